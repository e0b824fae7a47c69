"""What is left of a limit's rates, as the script that admits counts it."""

import pytest

from stepfleet.orchestrator import Limit
from stepfleet.orchestrator.store.limits import use_of

RATE = "requests_per_minute"


@pytest.mark.parametrize(
    ("state", "left"),
    [
        ({}, 10.0),
        ({"r": 4.0, "at": 100_000}, 4.0),
        ({"r": 4.0, "at": 99_000}, 5.0),
        ({"r": -3.0, "at": 98_000}, -1.0),
        ({"r": 4.0, "at": 0}, 10.0),
        ({"r": 0.0, "at": 90_000, "cool": 98_000}, 2.0),
        ({"r": 0.0, "at": 90_000, "cool": 120_000}, 0.0),
    ],
)
def test_a_rate_fills_with_time_up_to_its_burst_and_not_in_a_pause(
    state: dict[str, float], left: float
) -> None:
    found = use_of("openai:m", Limit(requests_per_minute=60, burst=10), state, {}, 100_000)
    assert (found.levels, found.rooms) == ({RATE: left}, {RATE: 10.0})


def test_a_learned_rate_below_the_configured_one_holds() -> None:
    state = {"r": 0.0, "at": 70_000, "l": {"r": 30.0}}
    found = use_of("openai:m", Limit(requests_per_minute=60, burst=10), state, {}, 100_000)
    assert (found.levels, found.rooms, found.learned) == ({RATE: 5.0}, {RATE: 5.0}, {RATE: 30.0})


def test_a_spent_budget_that_holds_runs_has_the_command_that_raises_it() -> None:
    """Also where the line is that of another name."""
    state = {"why": "tenant:it's ud"}
    found = use_of("openai:m", None, state, {"openai:m": 3}, 0)
    assert found.fix == """stepfleet limits set 'tenant:it'"'"'s' usd_per_day=..."""
    assert use_of("openai:m", None, state, {}, 0).fix == ""
