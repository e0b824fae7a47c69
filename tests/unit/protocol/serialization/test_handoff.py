"""The hand-off form: every counter of a state, and nothing that the log holds."""

from datetime import UTC, datetime
from typing import Any

import orjson

from stepfleet.orchestrator import AgentState, UsageStats
from stepfleet.orchestrator.protocol.serialization import handoff
from stepfleet.orchestrator.records.errors import ErrorContext
from stepfleet.orchestrator.records.memory_window import Window
from stepfleet.orchestrator.records.state import StateInfo

START = datetime(2026, 1, 1, tzinfo=UTC)
COUNTED: dict[str, Any] = {
    "step_count": 1,
    "session_steps": 2,
    "usage": UsageStats(total_tokens=3),
    "session_usage": UsageStats(total_tokens=4),
    "cost_usd": 0.5,
    "session_cost_usd": 1.5,
    "failures": ErrorContext(total_failures=2),
    "stop_requested": "enough",
    "strategy_state": {"s": 1},
    "custom_state": {"c": 1},
    "metadata": {"m": 1},
    "last_result": 7,
    "last_error": "e",
    "last_output": "o",
    "window": Window(since=1),
}


def test_every_counter_travels_and_comes_back() -> None:
    """SER-20: each on its own, as it was."""
    info = StateInfo(
        id="r", started_at=START, updated_at=START, cumulative_execution_seconds=2.5, execution=3
    )
    state = AgentState(agent_id="a", parent_agent_id="p", info=info, **COUNTED)
    told = orjson.loads(handoff(state))
    read = AgentState.model_validate(told)
    assert set(told) == {"agent_id", "parent_agent_id", "info", *COUNTED}
    assert {name: getattr(read, name) for name in COUNTED} == COUNTED
    assert read.info == info
