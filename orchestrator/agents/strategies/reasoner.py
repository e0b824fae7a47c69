"""A strategy as a reasoner: words its requests, reads its turns, keeps its state with the run.

Knows no particular strategy. Every exception of a strategy becomes a `StrategyError`, and with it
an error of the step, for the run's policy to decide on.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from stepfleet.orchestrator.agents.reasoner import ModelTurn, Reasoner, with_paragraph
from stepfleet.orchestrator.agents.strategies.json_mode import (
    in_json_mode,
    parsed_object,
    tools_paragraph,
    with_calls,
)
from stepfleet.orchestrator.agents.strategies.strategy import (
    OutputMode,
    StateChange,
    Strategy,
    StrategyContext,
    result_blocks,
    with_prompt,
)
from stepfleet.orchestrator.continuation import CanDecideToContinue
from stepfleet.orchestrator.continuation.guards import ALLOW, REQUEST, STOP, evaluation
from stepfleet.orchestrator.errors import StrategyError
from stepfleet.orchestrator.records.calls.tools import ToolSpec
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.outcome import ContinuationDecision, ContinuationEvaluation
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import Progress
from stepfleet.orchestrator.records.text.redaction import redact_error
from stepfleet.orchestrator.tools.schemas.bounded_json import BoundsError, plain_json

GOES_ON = "should_continue"
"""The key of the strategy state: the strategy's answer for the newest turn; missing means no."""
MOST_CORRECTIONS = 2
"""Corrections in a row for answers that cannot be read."""
_CORRECTED = "unreadable_answers"
_JSON = "Answer with one JSON object and nothing else."

T = TypeVar("T")


class StrategyReasoner(Reasoner):
    """Lets `strategy` lead the runs; `template` words the prompt anew for each call."""

    def __init__(self, strategy: Strategy, template: str | None = None) -> None:
        self.strategy = strategy
        self.template = template
        self._name = type(strategy).__name__
        self._json = strategy.mode is OutputMode.JSON
        self._worded: tuple[tuple[ToolSpec, ...], str] = ((), "")

    async def prepare(self, request: ModelRequest, state: AgentState) -> ModelRequest:
        """Return the request in the strategy's words. Raises `StrategyError`."""
        messages = request.messages
        if self.template is not None:
            history = self._called("get_history", lambda: self.strategy.get_history(state))
            messages = with_prompt(messages, self.template, history)
        messages = self._called(
            "prepare_messages", lambda: tuple(self.strategy.prepare_messages(messages, state))
        )
        words = self._called("instructions", self.strategy.instructions)
        if self._json:
            words = f"{words or _JSON}{self._tools_in_words(request.tools)}"
            return in_json_mode(request, with_paragraph(messages, words))
        return request.model_copy(update={"messages": with_paragraph(messages, words)})

    def interpret(self, response: LLMResponse, state: AgentState) -> LLMResponse:
        """Return the answer with the calls that its JSON object asks for."""
        return with_calls(response, state.session_steps + 1) if self._json else response

    async def read(self, turn: ModelTurn, state: AgentState) -> Progress | None:
        """Return the progress of the turn. Raises `StrategyError`."""
        try:
            parsed = self._parsed(turn.response)
        except BoundsError as error:
            return self._correction(error, state)
        blocks = result_blocks(turn.records, turn.texts)
        seen = StrategyContext(
            run_id=state.info.id,
            step=state.session_steps + 1,
            iteration=state.step_count + 1,
            response=turn.response,
            calls=turn.response.tool_calls or (),
            records=turn.records,
            texts=turn.texts,
        )
        try:
            change = _checked(await self.strategy.process_step(parsed, blocks, state, seen))
        except Exception as error:
            raise self._failure("process_step", error) from error
        goes_on = self._called("should_continue", lambda: self.strategy.should_continue(parsed))
        answer = self._called("answer", lambda: self.strategy.answer(parsed))
        return self._progress(change, bool(goes_on), answer, turn, state)

    def criteria(self) -> tuple[CanDecideToContinue, ...]:
        """Return the criterion that follows the strategy."""
        return (StrategyContinuation(self._name),)

    def _tools_in_words(self, tools: tuple[ToolSpec, ...]) -> str:
        # The same objects from step to step, and their schemas are long: worded once.
        known, text = self._worded
        if len(known) != len(tools) or not all(map(operator.is_, known, tools)):
            text = f"\n\n{tools_paragraph(tools)}" if tools else ""
            self._worded = tools, text
        return text

    def _parsed(self, response: LLMResponse) -> Any:
        if not self._json:
            return response.content
        try:
            return parsed_object(response.content)
        except BoundsError:
            if response.tool_calls:  # native calls need no object with them
                return {"thought": response.content}
            raise

    def _progress(
        self,
        change: StateChange,
        goes_on: bool,
        answer: str | None,
        turn: ModelTurn,
        state: AgentState,
    ) -> Progress | None:
        strategy_state = dict(self._storable(change.strategy))
        if state.strategy_state.get(GOES_ON, False) != goes_on:
            strategy_state[GOES_ON] = goes_on
        if state.strategy_state.get(_CORRECTED):
            strategy_state[_CORRECTED] = 0
        asks = goes_on and not turn.response.tool_calls
        progress = Progress(
            messages=(Message.added(self.strategy.nudge(), "strategy"),) if asks else (),
            output=answer,
            strategy_state=strategy_state,
            strategy_append=self._storable(change.append),
            custom_state=self._storable(change.custom),
        )
        return None if progress == Progress() else progress

    def _correction(self, error: BoundsError, state: AgentState) -> Progress:
        """Return a message that the answer is not a JSON object; raises after some."""
        corrected = int(state.strategy_state.get(_CORRECTED, 0))
        if corrected >= MOST_CORRECTIONS:
            msg = f"{self._name}: {corrected + 1} answers in a row could not be read: {error}"
            raise StrategyError(msg)
        message = f"Your answer could not be read: {error}. {_JSON}"
        return Progress(
            messages=(Message.added(message, "strategy"),),
            strategy_state={_CORRECTED: corrected + 1, GOES_ON: True},
        )

    def _storable(self, data: Mapping[str, Any]) -> dict[str, Any]:
        if not data:
            return {}
        try:
            stored: dict[str, Any] = plain_json(data)
        except BoundsError as error:
            raise StrategyError(
                f"{self._name}.process_step: its change cannot be stored: {error}"
            ) from None
        return stored

    def _called(self, method: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            raise self._failure(method, error) from error

    def _failure(self, method: str, error: Exception) -> StrategyError:
        if isinstance(error, StrategyError):
            return error
        why = redact_error(f"{type(error).__name__}: {error}")
        return StrategyError(f"{self._name}.{method} failed: {why}")


class StrategyContinuation:
    """Requests a step where the strategy wants one, else stops.

    A stop ends no tool loop: a request for tools that ran counts more.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Return request or stop; nothing is known before an execution's first step."""
        if state.step_count == 0:
            return ALLOW
        return REQUEST if state.strategy_state.get(GOES_ON) else STOP

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision with the strategy's name."""
        decision = self.decide(state)
        if decision is ALLOW:
            reason = f"{self.name} has seen no step yet"
        else:
            reason = (
                f"{self.name} asks for {'another' if decision is REQUEST else 'no further'} step"
            )
        return evaluation(self, decision, reason, {"strategy": self.name})


def _checked(change: Any) -> StateChange:
    if change is None:
        return StateChange()
    if not isinstance(change, StateChange):
        kind = type(change).__name__
        raise TypeError(f"it returned a {kind}; return a StateChange or None")
    return change
