"""A plan with the state of each of its steps: read from a model's list, kept with the run. Pure.

With the tool `update_plan`, by which a model sets the state of a step; nothing runs.
"""

import re
from datetime import datetime
from enum import StrEnum
from itertools import islice
from typing import Any, Self

from pydantic import Field, ValidationError

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord, ToolSpec, refused
from stepfleet.orchestrator.records.errors import ErrorType
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.text.validation import explain_invalid

UPDATE_PLAN = "update_plan"
PLAN = "plan"
"""The key of the strategy state that holds the plan: a list of steps with text and state."""
MOST_STEPS = 50
"""A plan keeps at most this many steps, because it travels with the run from step to step."""
LONGEST_STEP = 500
"""Characters of one step's text that are kept."""
LONGEST_TEXT = 100_000
"""Characters of an answer that are searched for a plan."""


class PlanStepState(StrEnum):
    """The progress of a step of a plan."""

    PENDING = "pending"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    BLOCKED = "blocked"


_MARKS = {
    "": PlanStepState.PENDING,
    "~": PlanStepState.IN_PROGRESS,
    ">": PlanStepState.IN_PROGRESS,
    "-": PlanStepState.IN_PROGRESS,
    "x": PlanStepState.COMPLETED,
    "!": PlanStepState.BLOCKED,
    **{state.value: state for state in PlanStepState},
    "in progress": PlanStepState.IN_PROGRESS,
    "done": PlanStepState.COMPLETED,
}
_WRITTEN = {
    PlanStepState.PENDING: " ",
    PlanStepState.IN_PROGRESS: "~",
    PlanStepState.COMPLETED: "x",
    PlanStepState.BLOCKED: "!",
}
_ITEM = re.compile(r"[ \t]*(?:\d{1,3}[.)]|[-*+])[ \t]+(\S.*)")
_MARK = re.compile(r"\[([^\[\]]{0,12})\][ \t]*(\S.*)")

INDICATORS = (
    "plan",
    "approach",
    "strategy",
    "steps:",
    "first",
    "then",
    "finally",
    "need to",
    "should",
    "will use",
)
"""Words of which one is enough. Whole words, or `plan` would be found in a planet."""

_INFLECTED = {"plan": r"plan(?:s|ned|ning)?", "approach": "approach(?:es)?"}
_MOST_READ = 64 * 1024
_WORD = re.compile(
    r"\b(?:"
    + "|".join(_INFLECTED.get(one, re.escape(one)) for one in INDICATORS)
    + r"|strategies)(?!\w)",
    re.IGNORECASE,
)


class PlanStep(Record):
    """One step of a plan."""

    text: str
    state: PlanStepState = PlanStepState.PENDING


class Plan(Record):
    """The steps of a plan, in their order."""

    steps: tuple[PlanStep, ...] = ()

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the plan that the list items of `text` make; an unmarked step is pending.

        Items are numbered or begin with a dash or star; `[x]`, `[~]`, `[!]` and `[ ]`, or a
        state's name in the brackets, give the state. Other lines are left out.
        """
        lines = text[:LONGEST_TEXT].splitlines()
        items = (found[1].strip() for line in lines if (found := _ITEM.match(line)))
        return cls(steps=tuple(_step(item) for item in islice(items, MOST_STEPS)))

    def as_text(self) -> str:
        """Return the plan as the numbered list that `from_text` reads."""
        lines = (f"[{_WRITTEN[step.state]}] {step.text}" for step in self.steps)
        return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))

    def with_state(self, number: int, state: PlanStepState) -> Self:
        """Return a copy in which step `number` (from 1) has `state`; raises `ValueError`."""
        if not 1 <= number <= len(self.steps):
            msg = f"the plan has no step {number}; its steps are 1 to {len(self.steps)}"
            raise ValueError(msg)
        steps = list(self.steps)
        steps[number - 1] = steps[number - 1].model_copy(update={"state": state})
        return self.model_copy(update={"steps": tuple(steps)})


def plan_of(state: AgentState) -> Plan:
    """Return the run's plan; it has no steps where this execution made none."""
    return Plan.model_validate({"steps": state.strategy_state.get(PLAN, [])})


def stored_plan(plan: Plan) -> dict[str, Any]:
    """Return the entry of the strategy state that keeps `plan`."""
    return {PLAN: [step.to_dict() for step in plan.steps]}


def is_planning_response(text: str) -> bool:
    """Return whether `text` holds one of the indicator words, in upper or lower case.

    Of a longer text the first 64 K characters count.
    """
    return _WORD.search(text, 0, _MOST_READ) is not None


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


def _step(item: str) -> PlanStep:
    marked = _MARK.fullmatch(item)
    state = _MARKS.get(marked[1].strip().lower()) if marked else None
    if marked is None or state is None:
        return PlanStep(text=item[:LONGEST_STEP])
    return PlanStep(text=marked[2][:LONGEST_STEP], state=state)
