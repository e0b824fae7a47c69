"""Planning: the turns in which a run plans, their prompts, and the plan that is kept.

Decides the form of a planning turn; must not know workers, stores or providers.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from stepfleet.orchestrator.agents.reasoner import HandledCalls, ModelTurn, Reasoner, both
from stepfleet.orchestrator.agents.strategies.json_mode import as_text
from stepfleet.orchestrator.agents.strategies.strategy import prompt_of
from stepfleet.orchestrator.continuation import CanDecideToContinue
from stepfleet.orchestrator.continuation.guards import REQUEST, STOP, evaluation
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.tools import (
    NOT_EXECUTED,
    ToolCall,
    ToolCallRecord,
    ToolSpec,
    refused,
)
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.errors import ErrorType
from stepfleet.orchestrator.records.outcome import ContinuationDecision, ContinuationEvaluation
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import Progress, StepType
from stepfleet.orchestrator.records.text.validation import explain_invalid


class Planning(Record):
    """Planning turns of a run: `at_start` of each execution, and after `every` k other steps.

    `every` 0 plans at the start alone. With `tracked` the model is offered the tool
    `update_plan`, which sets the state of a step of the plan.
    """

    at_start: bool = True
    every: int = Field(default=0, ge=0, le=1000)
    tracked: bool = False

    @model_validator(mode="after")
    def _plans_at_all(self) -> Self:
        if not self.at_start and not self.every:
            raise ValueError("it never plans: set at_start=True, or every to a number of steps")
        return self


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


class AgentPlan(Record):
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


def plan_of(state: AgentState) -> AgentPlan:
    """Return the run's plan; it has no steps where this execution made none."""
    return AgentPlan.model_validate({"steps": state.strategy_state.get(PLAN, [])})


def stored_plan(plan: AgentPlan) -> dict[str, Any]:
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


def updated(plan: AgentPlan, call: ToolCall, at: datetime) -> tuple[AgentPlan, ToolCallRecord]:
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


NO_TOOLS = "no tools are available"

_FORM = (
    "Write the plan as a numbered list, one step per line, each with its state in brackets: "
    "[ ] pending, [~] in progress, [x] completed, [!] blocked."
)


def initial_prompt(task: str, tools: Iterable[ToolSpec]) -> str:
    """Return the prompt for an approach to `task`, sent before the first step."""
    return (
        f"Task: {task}\n"
        f"Tools: {_names(tools)}.\n"
        "Before you act: what is your approach? Do not solve the task yet. "
        f"{_FORM}"
    )


def next_prompt(
    task: str, iteration: int, tools: Iterable[ToolSpec], plan: AgentPlan | None = None
) -> str:
    """Return the prompt for the next step of `task`, in iteration `iteration` (from 1)."""
    known = f"Your plan so far:\n{plan.as_text()}\n" if plan and plan.steps else ""
    return (
        f"Task: {task}\n"
        f"This is iteration {iteration}. Tools: {_names(tools)}.\n"
        f"{known}"
        "From your observations so far: what is the next step? Do not act yet; bring the plan up "
        f"to date. {_FORM}"
    )


def tools_prompt(tools: Sequence[ToolSpec]) -> str:
    """Return one line per tool, its name and description, under a heading."""
    if not tools:
        return f"Tools: {NO_TOOLS}."
    lines = [f"- {tool.name}: {' '.join(tool.description.split())}".rstrip(": ") for tool in tools]
    return "\n".join(["Tools:", *lines])


def _names(tools: Iterable[ToolSpec]) -> str:
    return ", ".join(tool.name for tool in tools) or NO_TOOLS


PLANNED_AT = "planned_at"
"""The key of the strategy state: the steps of the execution before its last plan."""

_CARRY_OUT = "Carry out the plan."
_TASK = "as it was given at the start"
_NO_PLAN = "Go on with the task."
_ONLY_PLANS = "this turn only plans; make the call again when you carry out the plan"


class PlanningReasoner(Reasoner):
    """Makes the planning turns of `planning`; `inner` leads all other turns.

    A planning turn offers no tools and is never an answer.
    `calls_as_text` is true where conversations are sent without native calls.
    """

    def __init__(
        self, planning: Planning, inner: Reasoner | None = None, *, calls_as_text: bool = False
    ) -> None:
        self.planning = planning
        self.inner = inner or Reasoner()
        self._calls_as_text = calls_as_text

    async def prepare(self, request: ModelRequest, state: AgentState) -> ModelRequest:
        """Return the request for a plan when one is due."""
        if not _is_planning_turn(state, self.planning):
            offered = (*request.tools, SPEC) if self.planning.tracked else request.tools
            return await self.inner.prepare(request.model_copy(update={"tools": offered}), state)
        task = prompt_of(request.messages) or prompt_of(state.messages) or _TASK
        if state.step_count == 0:
            prompt = initial_prompt(task, request.tools)
        else:
            prompt = next_prompt(task, state.step_count + 1, request.tools, plan_of(state))
        messages = request.messages
        changes: dict[str, Any] = {"tool_choice": "none" if request.tools else "auto"}
        if self._calls_as_text:
            messages, changes = tuple(as_text(messages)), {"tools": (), "tool_choice": "auto"}
        changes["messages"] = (*messages, Message.user(prompt))
        return request.model_copy(update={**changes, "parallel_tool_calls": None})

    def interpret(self, response: LLMResponse, state: AgentState) -> LLMResponse:
        """Return the answer; a plan is read unchanged."""
        if _is_planning_turn(state, self.planning):
            return response
        return self.inner.interpret(response, state)

    def handle(self, response: LLMResponse, state: AgentState) -> HandledCalls | None:
        """Answer the calls of `update_plan`, and all calls of a planning turn."""
        calls, at = response.tool_calls or (), state.info.updated_at
        if _is_planning_turn(state, self.planning):
            refuse = partial(
                refused, error_type=ErrorType.TOOL, code=NOT_EXECUTED, message=_ONLY_PLANS
            )
            return HandledCalls({n: refuse(one, at) for n, one in enumerate(calls)})
        theirs = self.inner.handle(response, state)
        if not self.planning.tracked:
            return theirs
        taken = theirs.records if theirs else {}
        plan, records = plan_of(state), dict[int, ToolCallRecord]()
        for index, call in enumerate(calls):
            if call.name == UPDATE_PLAN and index not in taken:
                plan, records[index] = updated(plan, call, at)
        if not records:
            return theirs
        return both(theirs, HandledCalls(records, Progress(strategy_state=stored_plan(plan))))

    async def read(self, turn: ModelTurn, state: AgentState) -> Progress | None:
        """Return the plan that a planning turn has made."""
        if not _is_planning_turn(state, self.planning):
            return await self.inner.read(turn, state)
        text = turn.response.content
        plan = AgentPlan.from_text(text)
        planned = plan.steps or is_planning_response(text)
        return Progress(
            step_type=StepType.PLANNING,
            messages=(Message.added(_CARRY_OUT if planned else _NO_PLAN, "planning"),),
            strategy_state={
                PLANNED_AT: state.step_count,
                **(stored_plan(plan) if plan.steps else {}),
            },
        )

    def criteria(self) -> tuple[CanDecideToContinue, ...]:
        """Return the criteria of `inner`, then the one that a plan is carried out."""
        return (*self.inner.criteria(), PlanToCarryOut())


class PlanToCarryOut:
    """Requests a step after a planning turn, which is not an answer; else stops."""

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Return request or stop."""
        last = state.current_step
        planned = state.step_count > 0 and last is not None and last.type is StepType.PLANNING
        return REQUEST if planned else STOP

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision with the steps made."""
        decision = self.decide(state)
        reason = "the last step planned" if decision is REQUEST else "the last step did not plan"
        return evaluation(self, decision, reason, {"steps": state.step_count})


def _is_planning_turn(state: AgentState, planning: Planning) -> bool:
    """Return whether the step after `state` plans.

    A planning turn that failed is due again: only one that was read is stored.
    """
    planned_at = state.strategy_state.get(PLANNED_AT)
    if planned_at is None:
        waited = planning.every > 0 and state.step_count >= planning.every
        return planning.at_start or waited
    return planning.every > 0 and state.step_count - int(planned_at) > planning.every
