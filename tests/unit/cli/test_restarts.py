from stepfleet.orchestrator.cli.options import USAGE
from stepfleet.orchestrator.cli.workers import QUICK_DEATHS, QUICK_SECONDS, Restarts


def test_each_quick_death_in_a_row_doubles_the_pause() -> None:
    once = Restarts().after_death(1.0)
    twice = once.after_death(1.0)

    assert twice.pause == 2 * once.pause


def test_a_worker_that_keeps_dying_at_its_start_is_hopeless() -> None:
    restarts = Restarts()
    for _ in range(QUICK_DEATHS - 1):
        restarts = restarts.after_death(0.5)
    assert not restarts.hopeless

    assert restarts.after_death(0.5).hopeless


def test_a_long_life_forgives_earlier_deaths() -> None:
    restarts = Restarts(quick_deaths=QUICK_DEATHS - 1).after_death(QUICK_SECONDS + 1)

    assert restarts.quick_deaths == 0
    assert not restarts.hopeless


def test_wrong_settings_at_the_first_start_are_hopeless_at_once() -> None:
    assert Restarts().after_death(1.0, USAGE).hopeless
    assert Restarts().after_death(QUICK_SECONDS + 1, USAGE).hopeless, "on a slow machine too"
    assert not Restarts().after_death(1.0, 1).hopeless


def test_wrong_settings_after_a_restart_may_be_mended_meanwhile() -> None:
    lived = Restarts().after_death(QUICK_SECONDS + 1)

    assert not lived.after_death(1.0, USAGE).hopeless
