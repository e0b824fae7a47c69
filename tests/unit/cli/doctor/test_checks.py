from dataclasses import replace

from stepfleet.orchestrator.cli.doctor import checks
from stepfleet.orchestrator.cli.doctor.checks import State
from stepfleet.orchestrator.cli.setup.redis_facts import RedisFacts
from stepfleet.orchestrator.store.fleet.health import (
    ServerFacts,
    health_findings,
    version_of,
    warnings,
)

SOUND = ServerFacts("7.0.15", append_only=True, eviction="noeviction")
STORE = RedisFacts(SOUND, shards=16, quarantined=0)


def test_a_sound_redis_gives_no_worries() -> None:
    assert health_findings(SOUND) == []
    assert {check.state for check in checks.redis(SOUND)} == {State.OK}


def test_each_danger_of_a_redis_fails_with_a_fix_of_its_own() -> None:
    bad = replace(SOUND, version="6.2.14", append_only=False, eviction="allkeys-lru", full=True)

    found = checks.redis(replace(bad, writes=False))

    assert [check.state for check in found] == [State.FAIL] * 5
    assert "appendonly yes" in found[1].fix
    assert "noeviction" in found[2].fix


def test_a_server_that_hides_its_settings_is_not_accused() -> None:
    assert health_findings(replace(SOUND, append_only=None, eviction=None)) == []
    assert warnings({}) == []


def test_clients_and_workers_are_warned_in_the_same_words_as_the_command_line() -> None:
    info = {"redis_version": "6.2.14", "aof_enabled": 0, "maxmemory_policy": "allkeys-lru"}

    bad = ServerFacts("6.2.14", append_only=False, eviction="allkeys-lru")

    assert ServerFacts.of(info) == bad
    assert warnings(info) == [finding.text for finding in health_findings(bad)]
    assert len(warnings(info)) == 3


def test_versions_are_compared_as_numbers() -> None:
    assert version_of("7.10.1") > version_of("7.9")
    assert version_of("unknown") == ()


def test_an_old_python_fails() -> None:
    assert checks.python((3, 10, 4)).state is State.FAIL
    assert checks.python((3, 11, 0)).state is State.OK


def test_a_library_outside_its_bounds_is_named_with_both_versions() -> None:
    check = checks.libraries(["redis>=6,<9", "celery>=5.7"], {"redis": "9.0", "celery": "5.7.0"})

    assert check.state is State.FAIL
    assert "redis is 9.0" in check.found


def test_a_missing_library_fails_and_those_of_extras_do_not_count() -> None:
    check = checks.libraries(['flower>=2; extra == "flower"', "typer>=1"], {})

    assert check.found == "typer is missing"


def test_other_shards_than_the_stores_fail_with_the_stores_number() -> None:
    assert checks.shards(STORE, 16).state is State.OK
    assert checks.shards(replace(STORE, shards=None), 16).state is State.OK
    assert "STEPFLEET_SHARDS=16" in checks.shards(STORE, 4).fix


def test_no_workers_is_a_failure_only_while_runs_wait() -> None:
    assert checks.workers([], waiting=0).state is State.WARN
    assert checks.workers([], waiting=3).state is State.FAIL
    assert checks.workers(["host:1"], waiting=3).state is State.OK


def test_a_queue_that_nobody_serves_is_told_with_who_waits_and_the_command() -> None:
    """A failure only while runs wait."""
    gpu, sound, steps = checks.queues({"gpu": 1, "sound": 0, "stepfleet": 3}, "stepfleet")
    assert (gpu.about, gpu.state, sound.state) == ("queue gpu", State.FAIL, State.WARN)
    assert "1 run waits for a tool there" in gpu.found
    assert gpu.fix == "start one: stepfleet worker --agents MODULE --queue gpu"
    assert "3 runs wait for a step" in steps.found
    assert steps.fix == "start one: stepfleet worker --agents MODULE"
    assert checks.queues({}, "stepfleet") == []


def test_a_variable_of_no_effect_is_told_with_what_may_be_meant() -> None:
    """CONF-05"""
    given = {
        "STEPFLEET_SLOTS": "1",
        "STEPFLEET_DATA": "x",
        "STEPFLEET_AGENT__OLD_CLERK__MAX_STEPS": "1",
        "HOME": "/",
    }
    assert checks.variables(given, ["slots"], ["old clerk"]).state is State.OK
    assert checks.variables(given, ["slots"], []).state is State.OK
    other = checks.variables({"STEPFLEET_SLOTZ": "1", **given}, ["slots"], ["clerk"])
    assert other.state is State.WARN
    assert "STEPFLEET_SLOTZ; did you mean 'STEPFLEET_SLOTS'?" in other.found
    assert "STEPFLEET_AGENT__OLD_CLERK__MAX_STEPS (no agent of that name)" in other.found


def test_few_open_files_for_many_slots_are_told() -> None:
    assert checks.open_files(1024, slots=1000).state is State.WARN
    assert checks.open_files(65_536, slots=1000).state is State.OK
    assert checks.open_files(-1, slots=1000).state is State.OK


def test_quarantined_messages_are_told() -> None:
    assert checks.quarantine(0).state is State.OK
    assert checks.quarantine(2).state is State.WARN


def test_every_finding_that_is_not_ok_names_a_fix() -> None:
    found = [
        checks.python((3, 8)),
        checks.libraries(["typer>=1"], {}),
        checks.worker_extra(["aiohttp"]),
        checks.shards(STORE, 4),
        checks.workers([], waiting=1),
        checks.agents([]),
        checks.open_files(10, slots=10),
        checks.quarantine(1),
        checks.variables({"STEPFLEET_X": ""}, [], []),
        *checks.queues({"gpu": 0, "stepfleet": 0}, "stepfleet"),
    ]

    assert all(check.fix for check in found)
    assert State.OK not in {check.state for check in found}


def test_a_library_is_found_however_its_name_is_spelled() -> None:
    assert (
        checks.libraries(["docstring-parser>=0.17"], {"docstring_parser": "0.18"}).state is State.OK
    )
