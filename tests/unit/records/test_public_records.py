"""Every public type that holds data is JSON data and back."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel

import stepfleet.orchestrator as package
from stepfleet.orchestrator.records.state import StateInfo

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
INFO = StateInfo(id="r1", started_at=NOW, updated_at=NOW)
CONFIG = package.AgentConfig(name="plain", model="openai:none")
FAILED: dict[str, Any] = {
    "run_id": "r1",
    "agent": "plain",
    "model": "m",
    "stop_reason": "steps_limit",
    "step": 2,
    "text": "no such product 'x'",
    "cause": {"kind": "tool", "tool": "stock", "text": "no such product"},
}
SUMMARY = {
    "run_id": "r1",
    "agent": "clerk",
    "status": "completed",
    "created": NOW,
    "updated": NOW,
    "tokens": 12,
}
SCHEDULE = {"name": "s", "cron": "@daily", "agent": "plain", "config": "0", "created": NOW}
GIVEN: dict[str, dict[str, Any]] = {
    "Action": {"tool_name": "look", "tool_call_id": "c1", "arguments": {"a": 1}},
    "AgentCheckpoint": {
        "timestamp": NOW,
        "run_id": "r1",
        "config": CONFIG,
        "state": package.AgentState(agent_id="r1", info=INFO),
    },
    "AgentConfig": {"name": "plain", "model": "openai:none"},
    "ArchiveDamage": {"file": "f", "url": "s3://b/f", "why": "it is missing", "runs": 2},
    "Ask": {
        "run_id": "r1",
        "step": 1,
        "index": 0,
        "key": "r1.0",
        "call_id": "c1",
        "kind": "approval",
        "agent": "plain",
        "tool": "look",
        "since": NOW,
    },
    "BatchProgress": {"batch_id": "b1", "created": NOW, "sealed": True, "total": 3},
    "CostLine": {"run_id": "r1", "step": 1, "agent": "plain", "state": "lost", "usd": "0.25"},
    "Costs": {"since": "2026-11-01", "until": "2026-11-22", "total": {"usd": "0.000000001"}},
    "Decision": {"approved": True, "by": "ada", "at": NOW},
    "FleetOverview": {
        "redis_version": "7.4",
        "active": 1,
        "queue_length": None,
        "oldest_due_seconds": 0.5,
    },
    "AgentRunResult": {
        "run_id": "r1",
        "agent_name": "plain",
        "lifecycle": "completed",
        "start_time": NOW,
        "max_iterations": 3,
        "metadata": {"ticket": 7},
    },
    "AgentState": {"agent_id": "r1", "info": INFO, "metadata": {"a": [1, None]}},
    "Cause": {"kind": "tool", "tool": "stock", "text": "no such product"},
    "ContinuationEvaluation": {"criterion": "C", "decision": "stop", "reason": "none"},
    "ContinuationOutcome": {"decision": "stop", "should_continue": False, "resolved_by": "C"},
    "DebugSummary": {
        "run_id": "r1",
        "agent_name": "plain",
        "lifecycle": "failed",
        "max_iterations": 3,
    },
    "ErrorInfo": {"type": "model", "code": "MODEL_ERROR", "message": "it is down"},
    "FailedRun": FAILED,
    "FailureGroup": {
        "cause": FAILED["cause"],
        "runs": 3,
        "steps": {2: 2, 3: 1},
        "limits": {"max_steps": 16},
        "example": FAILED,
    },
    "Failures": {"batch_id": "b1", "not_completed": 4, "read": 4},
    "FinalAnswer": {"answer": "Oslo", "structured": {"city": "Oslo"}},
    "Handoff": {"step": 1, "by": "reception", "to": "billing"},
    "LastError": {"type": "tool", "code": "TOOL_EXECUTION_ERROR", "message": "no", "step": 2},
    "Limit": {"requests_per_minute": 3000, "in_flight": 5},
    "RunSummary": SUMMARY,
    "RunTimeline": {"run": SUMMARY, "steps": ({"step": 1, "model": "m"},)},
    "RunTree": {"run": SUMMARY, "below": ({"run": SUMMARY},), "left_out": 1},
    "StepSummary": {"step": 1, "type": "action", "started_at": NOW, "tool_calls": ()},
    "AuditEntry": {
        "at": "2026-01-02T12:00:00+00:00",
        "user": "ann",
        "action": "cancel",
        "target": "run r1",
        "detail": "done",
    },
    "ScaleSignal": {
        "queue": "stepfleet",
        "work": 5,
        "queued": 3,
        "due_soon": 1,
        "in_hand": 1,
        "slots": 2,
        "workers": 1,
        "wanted": 3,
        "slots_per_worker": 2,
        "waits": {"limits": 4},
    },
    "BudgetUse": {"field": "usd", "budget": "5", "spent": "1.25", "reserved": "0", "left": "3.75"},
    "LimitState": {"name": "openai:m", "waiting": 3},
    "BatchCheck": {
        "lines": 2,
        "good": 1,
        "bad": 1,
        "problems": [
            {"unit": "line", "line": 2, "field": "input", "text": "field 'input' is null"}
        ],
        "batch_id": "b",
    },
    "BatchPage": {"batches": [], "next": "W10"},
    "LineProblem": {"unit": "line", "line": 2, "field": "input", "text": "field 'input' is null"},
    "LimitWaits": {"waits_for": "calls in flight of openai:m", "runs": 2, "seconds": 1.5},
    "LimitWait": {"seconds": 1.5, "waits_for": "calls in flight of openai:m"},
    "LimitUse": {"name": "openai:m", "limit": {"in_flight": 5}, "in_flight": 3},
    "LLMResponse": {"content": "hi"},
    "Message": {"role": "user", "content": [{"text": "hi"}]},
    "LoggedStep": {"result": {"step": 1, "started_at": NOW}, "committed_at": NOW},
    "ModelCall": {
        "model_id": "m",
        "input_tokens": 3,
        "output_tokens": 2,
        "cost": 0.5,
        "timestamp": NOW,
    },
    "ModelRequest": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "RunComparison": {
        "first": {"run_id": "a", "agent_name": "p", "model": "m", "lifecycle": "completed"},
        "second": {"run_id": "b", "agent_name": "p", "model": "m", "lifecycle": "failed"},
        "same_output": False,
        "settings": {"model": ("a", "b")},
    },
    "Observation": {"tool_call_id": "c1", "result": "a lamp"},
    "PlanningStep": {"plan": "look first"},
    "Task": {"content": "hi"},
    "RunView": {"run_id": "r1", "agent_name": "plain", "status": "completed"},
    "StepResult": {"step": 1, "started_at": NOW},
    "ToolTrace": {
        "step": 1,
        "index": 0,
        "call": {"tool_name": "look", "call_id": "c1", "timestamp": NOW},
    },
    "ToolSpec": {"name": "look"},
    "UIMessage": {"id": "r1:step:1", "role": "assistant", "content": "hi", "timestamp": NOW},
    "RunEnd": {"run_id": "r1.0123456789", "agent": "plain", "status": "completed"},
    "Schedule": SCHEDULE,
    "ScheduleView": {"schedule": SCHEDULE, "next_tick": NOW},
    "ToolCall": {"id": "c1", "name": "look", "arguments": {"a": 1}},
    "ToolInvocation": {
        "run_id": "r1",
        "execution": 1,
        "step": 1,
        "index": 0,
        "call_id": "c1",
        "tool": "look",
        "idempotency_key": "k",
    },
    "ToolCallRecord": {"tool_name": "look", "call_id": "c1", "timestamp": NOW, "result": [1]},
}


def needs(name: str) -> bool:
    """Return whether a record has fields without a default."""
    return any(one.is_required() for one in getattr(package, name).model_fields.values())


RECORDS = [
    name
    for name in dir(package)
    if isinstance(getattr(package, name), type)
    and issubclass(getattr(package, name), BaseModel)
    and name != "Settings"
]


@pytest.mark.parametrize("name", [name for name in RECORDS if name in GIVEN or not needs(name)])
def test_a_public_record_is_json_and_back(name: str) -> None:
    """SER-19"""
    kind = getattr(package, name)
    made = kind.model_validate(GIVEN.get(name, {}))
    text = json.dumps(made.model_dump(mode="json"))
    assert kind.model_validate(json.loads(text)) == made


def test_every_result_of_a_run_has_its_example() -> None:
    """SER-19"""
    assert set(RECORDS) >= GIVEN.keys() >= {name for name in RECORDS if needs(name)}
    assert {"AgentRunResult", "StepResult", "AgentState", "AgentCheckpoint"} <= GIVEN.keys()
