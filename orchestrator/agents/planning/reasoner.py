"""Planning as a reasoner around the others: planning turns are its own, all else is theirs."""

from collections.abc import Mapping
from typing import Any

from stepfleet.orchestrator.agents.planning.driver import PlanToCarryOut
from stepfleet.orchestrator.agents.planning.plan import Plan
from stepfleet.orchestrator.agents.planning.prompts import initial_prompt, next_prompt
from stepfleet.orchestrator.agents.planning.recognition import is_planning_response
from stepfleet.orchestrator.agents.planning.schedule import (
    PLANNED_AT,
    is_planning_turn,
    plan_of,
    stored_plan,
)
from stepfleet.orchestrator.agents.planning.settings import Planning
from stepfleet.orchestrator.agents.planning.updates import SPEC, UPDATE_PLAN, refusal, updated
from stepfleet.orchestrator.agents.reasoner import HandledCalls, ModelTurn, Reasoner, joined
from stepfleet.orchestrator.agents.strategies.json_mode import as_text
from stepfleet.orchestrator.agents.strategies.template import prompt_of
from stepfleet.orchestrator.continuation import CanDecideToContinue
from stepfleet.orchestrator.records.errors import ErrorType
from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import Progress, StepType
from stepfleet.orchestrator.records.tools import ToolCallRecord

_CARRY_OUT = "Carry out the plan."
_TASK = "as it was given at the start"
_NO_PLAN = "Go on with the task."
_ONLY_PLANS = "this turn only plans; make the call again when you carry out the plan"


class PlanningReasoner(Reasoner):
    """Makes the planning turns that `planning` asks for; `inner` leads all other turns.

    A planning turn offers no tools and is no answer, whatever `inner` makes of answers.
    `told_as_text` says that the model is told conversations without native calls.
    """

    def __init__(
        self, planning: Planning, inner: Reasoner | None = None, *, calls_as_text: bool = False
    ) -> None:
        self.planning = planning
        self.inner = inner or Reasoner()
        self._calls_as_text = calls_as_text

    async def prepare(self, request: ModelRequest, state: AgentState) -> ModelRequest:
        """Return the request for a plan when one is due."""
        if not is_planning_turn(state, self.planning):
            offered = (*request.tools, SPEC) if self.planning.tracked else request.tools
            return await self.inner.prepare(request.model_copy(update={"tools": offered}), state)
        task = prompt_of(request.messages) or prompt_of(state.messages) or _TASK
        if state.step_count == 0:
            question = initial_prompt(task, request.tools)
        else:
            question = next_prompt(task, state.step_count + 1, request.tools, plan_of(state))
        messages = request.messages
        changes: dict[str, Any] = {"tool_choice": "none" if request.tools else "auto"}
        if self._calls_as_text:
            messages, changes = tuple(as_text(messages)), {"tools": (), "tool_choice": "auto"}
        changes["messages"] = (*messages, Message.user(question))
        return request.model_copy(update={**changes, "parallel_tool_calls": None})

    def interpret(self, response: LLMResponse, state: AgentState) -> LLMResponse:
        """Return the answer; a plan is read as it stands."""
        if is_planning_turn(state, self.planning):
            return response
        return self.inner.interpret(response, state)

    def handle(self, response: LLMResponse, state: AgentState) -> HandledCalls | None:
        """Answer the calls of `update_plan`, and all calls of a planning turn."""
        calls = response.tool_calls or ()
        at = state.info.updated_at
        if is_planning_turn(state, self.planning):
            return HandledCalls(
                {
                    index: refusal(call, at, ErrorType.TOOL, "NOT_EXECUTED", _ONLY_PLANS)
                    for index, call in enumerate(calls)
                }
            )
        theirs = self.inner.handle(response, state)
        taken = theirs.records if theirs else {}
        ours = self._updates(response, state, taken) if self.planning.tracked else None
        if theirs is None or ours is None:
            return theirs or ours
        records = {**ours.records, **theirs.records}
        return HandledCalls(records, joined(ours.progress, theirs.progress))

    async def read(self, turn: ModelTurn, state: AgentState) -> Progress | None:
        """Return the plan that a planning turn has made."""
        if not is_planning_turn(state, self.planning):
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
        """Return the driver of planning behind those of the others."""
        return (*self.inner.criteria(), PlanToCarryOut())

    def _updates(
        self, response: LLMResponse, state: AgentState, taken: Mapping[int, ToolCallRecord]
    ) -> HandledCalls | None:
        plan, records = plan_of(state), dict[int, ToolCallRecord]()
        for index, call in enumerate(response.tool_calls or ()):
            if call.name == UPDATE_PLAN and index not in taken:
                plan, records[index] = updated(plan, call, state.info.updated_at)
        if not records:
            return None
        return HandledCalls(records, Progress(strategy_state=stored_plan(plan)))
