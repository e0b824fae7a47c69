"""How an agent words its requests and reads its answers: the seam of strategies and contracts.

Decides nothing itself; knows no particular strategy. One reasoner serves many runs at once, so
it keeps nothing of a run: what a run has to remember goes into its state, by `Progress`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

from stepfleet.orchestrator.continuation import CanDecideToContinue
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import Progress
from stepfleet.orchestrator.records.tools import ToolCallRecord


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """One answer of the model, and a record and a text of each of its calls, in call order."""

    response: LLMResponse
    records: tuple[ToolCallRecord, ...] = ()
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HandledCalls:
    """Calls of a turn that are answered without a tool, by index, and what they amount to."""

    records: Mapping[int, ToolCallRecord] = field(default_factory=dict)
    progress: Progress | None = None


class Reasoner:
    """One way of asking and reading; every method may be left as it is here.

    `prepare` is called before each model call, `interpret` once per answer, `handle` before
    the turn's tools and `read` behind them. A step that is done again after a crash repeats
    all but `interpret`: they must come to the same each time.
    """

    async def prepare(self, request: ModelRequest, state: AgentState) -> ModelRequest:  # noqa: ARG002
        """Return what the model is sent instead of `request`. What it raises fails the step."""
        return request

    def interpret(self, response: LLMResponse, state: AgentState) -> LLMResponse:  # noqa: ARG002
        """Return the answer as the step shall take and store it: calls read from its text, say.

        Must not raise: what is wrong with an answer is for `read` to tell, since the call has
        been paid for.
        """
        return response

    def handle(self, response: LLMResponse, state: AgentState) -> HandledCalls | None:  # noqa: ARG002
        """Return the calls that are answered here and never run, and what they mean.

        An error record of such a call is told to the model; it is no failure of the step.
        """
        return None

    async def read(self, turn: ModelTurn, state: AgentState) -> Progress | None:  # noqa: ARG002
        """Return what the turn means. `state` is the state before it.

        What it raises becomes an error of the step, which is stored with all that it did.
        """
        return None

    def criteria(self) -> tuple[CanDecideToContinue, ...]:
        """Return its part of the decision whether the run goes on."""
        return ()


class ReasonerChain(Reasoner):
    """Several reasoners in order: requests pass through all, and each reads the turn.

    A call belongs to the first that handles it. Where two set the same thing, the later wins.
    """

    def __init__(self, *reasoners: Reasoner) -> None:
        self.reasoners = reasoners

    async def prepare(self, request: ModelRequest, state: AgentState) -> ModelRequest:
        """Return the request as all of them have changed it."""
        for one in self.reasoners:
            request = await one.prepare(request, state)
        return request

    def interpret(self, response: LLMResponse, state: AgentState) -> LLMResponse:
        """Return the answer as all of them have read it."""
        return reduce(lambda read, one: one.interpret(read, state), self.reasoners, response)

    def handle(self, response: LLMResponse, state: AgentState) -> HandledCalls | None:
        """Return what any of them handles."""
        records: dict[int, ToolCallRecord] = {}
        progress = None
        for one in self.reasoners:
            if handling := one.handle(response, state):
                records = {**handling.records, **records}
                progress = joined(progress, handling.progress)
        return HandledCalls(records, progress) if records or progress else None

    async def read(self, turn: ModelTurn, state: AgentState) -> Progress | None:
        """Return what the turn means to all of them."""
        progress = None
        for one in self.reasoners:
            progress = joined(progress, await one.read(turn, state))
        return progress

    def criteria(self) -> tuple[CanDecideToContinue, ...]:
        """Return the criteria of all of them."""
        return tuple(criterion for one in self.reasoners for criterion in one.criteria())


def chain_of(*reasoners: Reasoner | None) -> Reasoner | None:
    """Return the reasoners that are there as one, or None where there is none."""
    there = [one for one in reasoners if one is not None]
    return ReasonerChain(*there) if len(there) > 1 else next(iter(there), None)


def joined(first: Progress | None, second: Progress | None) -> Progress | None:
    """Return what both say; where both set the same thing, `second` wins."""
    if first is None or second is None:
        return first or second
    return Progress(
        messages=first.messages + second.messages,
        step_type=second.step_type or first.step_type,
        answer=second.answer or first.answer,
        output=second.output or first.output,
        strategy_state={**first.strategy_state, **second.strategy_state},
        strategy_append={**first.strategy_append, **second.strategy_append},
        custom_state={**first.custom_state, **second.custom_state},
        error=first.error or second.error,
    )
