"""The whole state as JSON, beside its slim forms."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from stepfleet.orchestrator import (
    AgentState,
    Lifecycle,
    Message,
    ToolCall,
    ToolCallRecord,
    UsageStats,
)
from stepfleet.orchestrator.records.state import StateInfo

GOLDEN = Path(__file__).parent / "golden" / "state.json"
NOW = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)


def whole() -> AgentState:
    call = ToolCall(id="c1", name="look", arguments={"what": "ä"})
    return AgentState(
        agent_id="run-1",
        parent_agent_id="run-0",
        info=StateInfo(
            id="run-1",
            execution_id="run-1:1",
            started_at=NOW,
            updated_at=NOW,
            cumulative_execution_seconds=1.5,
        ),
        status=Lifecycle.IN_PROGRESS,
        messages=(
            Message.user([{"text": "hello"}, {"image": {"format": "png"}}]),
            Message.assistant("looking", (call,)),
            Message.tool(call, "seen"),
        ),
        tool_results=(
            ToolCallRecord(tool_name="look", call_id="c1", result=["seen"], timestamp=NOW),
        ),
        metadata={"ticket": 7},
        step_count=1,
        session_steps=1,
        usage=UsageStats(prompt_tokens=10, completion_tokens=5, total_tokens=15, llm_calls=1),
        cost_usd=0.25,
        custom_state={"mine": None},
        last_result=["seen"],
        last_output="looking",
    )


def test_the_whole_state_is_written_as_it_always_was() -> None:
    """SER-16: fields may be added, none may change."""
    differences = list(missing(orjson.loads(GOLDEN.read_bytes()), whole().to_dict(), "state"))
    assert differences == []
    assert AgentState.from_json(GOLDEN.read_bytes()) == whole()


def missing(wanted: Any, there: Any, place: str) -> list[str]:
    """Return the places where `there` lacks or changes what is `wanted`."""
    if isinstance(wanted, dict) and isinstance(there, dict):
        return [
            one
            for name in wanted
            for one in missing(wanted[name], there.get(name, missing), f"{place}.{name}")
        ]
    if isinstance(wanted, list) and isinstance(there, list) and len(wanted) == len(there):
        return [
            one
            for number, (left, right) in enumerate(zip(wanted, there, strict=True))
            for one in missing(left, right, f"{place}.{number}")
        ]
    return [] if wanted == there else [place]
