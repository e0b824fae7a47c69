"""Which calls a step waits for, for how long, and what is said of calls without a result."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from stepfleet.orchestrator import AgentConfig, AgentState, ToolCall
from stepfleet.orchestrator.protocol.attempt import Wait, gave_up, waited_in_vain
from stepfleet.orchestrator.protocol.waiting import LONGEST_WAIT, divided, patience
from stepfleet.orchestrator.records.state import StateInfo

NOW = datetime(2026, 1, 1, tzinfo=UTC)
QUEUES = {"heavy": "gpu"}


def calls(*names: str) -> list[ToolCall]:
    return [ToolCall(id=f"c{index}", name=name) for index, name in enumerate(names)]


def waits(*indexes: int) -> tuple[Wait, ...]:
    return tuple(Wait(index, "gpu", "heavy") for index in indexes)


def places(made: Sequence[ToolCall]) -> dict[int, str]:
    return {index: QUEUES[one.name] for index, one in enumerate(made) if one.name in QUEUES}


@pytest.mark.parametrize(
    ("names", "open_calls", "parallel", "now", "then"),
    [
        (["light", "light"], [0, 1], True, [0, 1], ()),
        (["light", "light"], [0, 1], False, [0, 1], ()),
        (["heavy", "light", "heavy"], [0, 1, 2], True, [1], waits(0, 2)),
        (["heavy", "light", "heavy"], [0, 1, 2], False, [], waits(0)),
        (["light", "heavy", "light", "heavy"], [0, 1, 2, 3], False, [0], waits(1)),
        (["light", "heavy", "light", "heavy"], [2, 3], False, [2], waits(3)),
        (["heavy", "unknown"], [1], False, [1], ()),
    ],
)
def test_a_turn_is_divided_into_what_runs_now_and_what_is_waited_for(
    names: list[str],
    open_calls: list[int],
    parallel: bool,
    now: list[int],
    then: tuple[Wait, ...],
) -> None:
    """TOOL-14: in order, nothing behind a heavy call starts before its result."""
    made = calls(*names)
    assert divided(open_calls, made, places(made), parallel=parallel) == (now, then)


def test_a_call_that_cannot_be_parsed_is_answered_in_the_step() -> None:
    broken = ToolCall(id="c", name="heavy", error="no arguments")
    assert divided([0], [broken], places([broken]), parallel=True) == ([0], ())


def state(started: datetime | None) -> AgentState:
    info = StateInfo(id="r", started_at=NOW, updated_at=NOW, execution_started_at=started)
    return AgentState(agent_id="a", info=info)


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [
        ({"time_limit": 300}, 240.0),
        ({"time_limit": 30}, 0.0),
        ({"time_limit": None}, LONGEST_WAIT.total_seconds()),
        ({"time_limit": 300, "cumulative_timeout": 10}, LONGEST_WAIT.total_seconds()),
        ({"time_limit": 10_000_000}, LONGEST_WAIT.total_seconds()),
    ],
)
def test_a_run_waits_until_its_wall_clock_limit(
    limits: dict[str, float | None], seconds: float
) -> None:
    """Workers' time alone sets no end to waiting."""
    config = AgentConfig.model_validate({"name": "a", "model": "openai:x", **limits})
    assert patience(config, state(NOW), NOW + timedelta(seconds=60)) == seconds


def test_a_call_without_a_result_is_reported_with_its_reason() -> None:
    call = calls("heavy")[0]
    vain, lost = waited_in_vain(call, NOW).error, gave_up(call, NOW, 3).error
    assert vain is not None
    assert "time_limit" in vain.message
    assert lost is not None
    assert "3 times" in lost.message
