"""Steps of a store's clock, by a clock that nobody sets."""

import pytest

from stepfleet.worker.runtime.rescuer import StoreClock


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ask(clock: StoreClock, now_ms: int, place: str = "here") -> float:
    return clock.answered(place, clock.asks(), now_ms)


@pytest.mark.parametrize(
    ("passed", "answered", "ahead"),
    [
        (5.0, 5_000, 0.0),
        (5.0, 14_000, 0.0),  # within the tolerance
        (5.0, 65_000, 60.0),
        (5.0, -3_600_000, 0.0),  # it was set back
        (600.0, 600_000, 0.0),  # nobody asked for long
    ],
)
def test_a_step_forward_is_noticed(passed: float, answered: int, ahead: float) -> None:
    own = Clock()
    clock = StoreClock(10.0, own)
    assert ask(clock, 10**12) == 0.0
    own.now += passed
    assert ask(clock, 10**12 + answered) == pytest.approx(ahead)
    own.now += 1
    assert ask(clock, 10**12 + answered + 1000) == 0.0


def test_an_answer_that_took_long_is_no_step() -> None:
    own = Clock()
    clock = StoreClock(1.0, own)
    assert ask(clock, 10**12) == 0.0
    asked = clock.asks()
    own.now += 30.0
    assert clock.answered("here", asked, 10**12 + 29_000) == 0.0


def test_each_place_has_a_clock_of_its_own() -> None:
    own = Clock()
    clock = StoreClock(1.0, own)
    assert ask(clock, 10**12) == 0.0
    assert ask(clock, 2 * 10**12, "elsewhere") == 0.0
    assert clock.latest("here") == 10**12 + 1000
    assert clock.latest("nowhere") is None


def test_without_a_tolerance_nothing_is_a_step() -> None:
    clock = StoreClock(elapsed=Clock())
    assert ask(clock, 1) == 0.0
    assert clock.latest("here") is None
    assert ask(clock, 10**15) == 0.0
