import json
from datetime import UTC, datetime
from typing import Any

import pytest

from stepfleet.orchestrator import AgentRunResult, ConfigurationError, Lifecycle
from stepfleet.orchestrator.batches.files.tables import cells, kinds, select

DATA = {"a": {"b": 1, "c.d": 2}, "e.f": 3, "list": [1]}


def result(structured: Any) -> AgentRunResult:
    return AgentRunResult(
        run_id="r1",
        agent_name="clerk",
        lifecycle=Lifecycle.COMPLETED,
        structured=structured,
        start_time=datetime(2026, 1, 2, tzinfo=UTC),
        max_iterations=1,
    )


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ("id, steps_used", {"id": "r1", "steps_used": 0}),
        ("structured.a.b", {"structured.a.b": 1}),
        ("structured.a.*", {"structured.a.b": 1, "structured.a.c.d": 2}),
        ("structured.a.c.d,structured.e.f", {"structured.a.c.d": 2, "structured.e.f": 3}),
        (
            "structured.list.b,structured.none.x",
            {"structured.list.b": None, "structured.none.x": None},
        ),
        ("structured.list.*", {"structured.list": [1]}),
        ("usage.llm_calls", {"usage.llm_calls": 0}),
        ("error,error", {"error": None}),
    ],
)
def test_fields_are_selected_by_name_and_by_path(fields: str, row: dict[str, Any]) -> None:
    assert cells(result(DATA), select(fields)) == row


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ("prize", "a part of the answer's data is structured.prize"),
        ("*", "a result has no field"),
        ("structured.*.a", "a result has no field"),
        ("structured.", "a result has no field"),
        ("output.length", "output is text and has no sub-fields"),
        ("cost_usd.*", "cost_usd is number"),
        (" , ", "none is named"),
    ],
)
def test_a_field_that_is_none_is_refused_with_the_fix(fields: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        select(fields)


def test_every_field_of_a_result_has_a_type() -> None:
    found = json.loads(json.dumps(result(DATA).to_dict()))
    assert ["id", *found] == list(kinds())
    assert {kinds()[name] for name in ("run_id", "status", "stop_reason", "error")} == {"text"}
    assert kinds()["row"] == "integer"
    assert kinds()["cost_usd"] == kinds()["duration_seconds"] == "number"
    assert (kinds()["end_time"], kinds()["success"]) == ("time", "boolean")
    assert kinds()["structured"] == kinds()["usage"] == kinds()["steps"] == "data"
