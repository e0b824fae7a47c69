"""The tool `update_plan`: a model sets the state of a step of its plan. Pure; nothing runs."""

from datetime import datetime

from pydantic import Field, ValidationError

from stepfleet.orchestrator.agents.planning.plan import Plan, PlanStepState
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.errors import ErrorType
from stepfleet.orchestrator.records.text.validation import explain_invalid
from stepfleet.orchestrator.records.tools import ToolCall, ToolCallRecord, ToolSpec, refused

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
    """Return the plan after a call of `update_plan`, and the call's record.

    An invalid call is an error that the model reads, and leaves the plan as it is.
    """
    try:
        given = _read(call)
        changed = plan.with_state(given.step, given.state)
    except ValueError as error:
        why = explain_invalid(error) if isinstance(error, ValidationError) else str(error)
        return plan, refused(
            call, at, error_type=ErrorType.VALIDATION, code="VALIDATION_ERROR", message=why
        )
    return changed, ToolCallRecord(
        tool_name=call.name,
        call_id=call.id,
        arguments=call.arguments,
        result=changed.as_text(),
        duration_ms=0.0,
        timestamp=at,
    )


def _read(call: ToolCall) -> _Arguments:
    if call.error is not None:
        raise ValueError(call.error)
    return _Arguments.model_validate(call.arguments)
