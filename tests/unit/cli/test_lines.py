from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import orjson
from support.runs.agent_records import a_state

from stepfleet.orchestrator import (
    AgentRunResult,
    ContinuationCriteria,
    ErrorPolicy,
    ErrorType,
    Lifecycle,
    RunStatus,
    StopReason,
)
from stepfleet.orchestrator.cli.result_file import Layout, to_line
from stepfleet.orchestrator.continuation import ErrorPolicyCriterion, StepsLimit
from stepfleet.orchestrator.records.run.facts import LastError

MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
RESULT = AgentRunResult(
    run_id="3279d834-4597-5292-b65d-59e0a95115be",
    line_id="sku-000123",
    agent_name="clerk",
    lifecycle=Lifecycle.COMPLETED,
    stop_reason=StopReason.COMPLETED,
    status=RunStatus.COMPLETED,
    output="42",
    start_time=MOMENT,
    end_time=MOMENT,
    max_iterations=10,
)


def names_in(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from names_in(one)
    if isinstance(value, dict):
        for name, one in value.items():
            yield name
            yield from names_in(one)


def test_all_names_of_a_line_are_in_snake_case() -> None:
    outcome = ContinuationCriteria(ErrorPolicyCriterion(ErrorPolicy()), StepsLimit(1)).evaluate(
        a_state(1)
    )
    line = orjson.loads(to_line(RESULT.model_copy(update={"outcome": outcome}), Layout("full")))
    assert {"should_continue", "error_type", "stop_reason"} <= set(names_in(line))
    assert [name for name in names_in(line) if name != name.lower()] == []
    read = AgentRunResult.model_validate(line)
    assert read.outcome is not None
    assert read.outcome.stop_reason == outcome.stop_reason


def test_a_slim_line_of_one_step_is_short_and_keeps_an_error() -> None:
    answered = RESULT.model_copy(
        update={
            "output": "The answer was given as structured data.",
            "structured": {"category": "kitchen", "price": 19.99},
            "cost_usd": 0.0000948,
        }
    )
    line = to_line(answered, Layout("slim"))
    assert len(line) < 300
    assert list(orjson.loads(line)) == [
        *("id", "run_id", "status", "stop_reason", "structured", "cost_usd", "end_time")
    ]
    last = LastError(type=ErrorType.TOOL, code="TOOL_ERROR", message="no gadgets", step=2)
    stopped = RESULT.model_copy(update={"last_error": last})
    assert "no gadgets" in orjson.loads(to_line(stopped, Layout("slim")))["error"]
