"""The tool `update_plan`: a model says how far a step of its plan is. Pure; nothing is run."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import Field, ValidationError

from stepfleet.orchestrator.agents.planning.plan import Plan, PlanStepState
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.errors import ErrorInfo, ErrorType
from stepfleet.orchestrator.records.text.validation import explain_invalid
from stepfleet.orchestrator.records.tools import ToolCall, ToolCallRecord, ToolSpec

UPDATE_PLAN = "update_plan"


class _Arguments(Record):
    step: int = Field(ge=1)
    state: PlanStepState


SPEC = ToolSpec(
    name=UPDATE_PLAN,
    description="Note how far a step of your plan is. Call it beside other tools.",
    parameters={
        "type": "object",
        "properties": {
            "step": {"type": "integer", "minimum": 1, "description": "The step's number."},
            "state": {"type": "string", "enum": [state.value for state in PlanStepState]},
        },
        "required": ["step", "state"],
        "additionalProperties": False,
    },
)


def updated(plan: Plan, call: ToolCall, at: datetime) -> tuple[Plan, ToolCallRecord]:
    """Return the plan behind a call of `update_plan`, and the call's record.

    A call that does not fit is an error that the model reads, and leaves the plan as it is.
    """
    try:
        given = _read(call)
        changed = plan.with_state(given.step, given.state)
    except ValueError as error:
        said = explain_invalid(error) if isinstance(error, ValidationError) else str(error)
        return plan, refusal(call, at, ErrorType.VALIDATION, "VALIDATION_ERROR", said)
    return changed, ToolCallRecord(
        tool_name=call.name,
        call_id=call.id,
        arguments=call.arguments,
        result=changed.as_text(),
        duration_ms=0.0,
        timestamp=at,
    )


def refusal(
    call: ToolCall, at: datetime, kind: ErrorType, code: str, message: str
) -> ToolCallRecord:
    """Return the record of a call that was answered by an error and never run."""
    error = ErrorInfo(type=kind, code=code, message=message, tool_name=call.name, call_id=call.id)
    return ToolCallRecord(
        tool_name=call.name,
        call_id=call.id,
        arguments=call.arguments,
        is_error=True,
        duration_ms=0.0,
        timestamp=at,
        error=error,
    )


def _read(call: ToolCall) -> _Arguments:
    if call.error is not None:
        raise ValueError(call.error)
    arguments: Mapping[str, Any] = call.arguments
    return _Arguments.model_validate(arguments)
