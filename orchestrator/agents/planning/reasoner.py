"""Planning as a reasoner around the others: it leads the planning turns, they lead all others."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from stepfleet.orchestrator.agents.planning.plan import (
    SPEC,
    UPDATE_PLAN,
    Plan,
    is_planning_response,
    plan_of,
    stored_plan,
    updated,
)
from stepfleet.orchestrator.agents.planning.settings import Planning
from stepfleet.orchestrator.agents.reasoner import HandledCalls, ModelTurn, Reasoner, both
from stepfleet.orchestrator.agents.strategies.json_mode import as_text
from stepfleet.orchestrator.agents.strategies.template import prompt_of
from stepfleet.orchestrator.continuation import CanDecideToContinue
from stepfleet.orchestrator.continuation.guards import REQUEST, STOP, evaluation
from stepfleet.orchestrator.records.calls.tools import (
    NOT_EXECUTED,
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
    task: str, iteration: int, tools: Iterable[ToolSpec], plan: Plan | None = None
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
        plan = Plan.from_text(text)
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
    """Requests a step after a planning turn, else stops: a plan is no answer."""

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
