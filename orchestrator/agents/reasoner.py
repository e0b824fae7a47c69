"""Reasoners word an agent's requests and read its answers: the seam of strategies and contracts.

Decides nothing itself; knows no particular strategy. One reasoner serves many runs at once and
keeps nothing of a run: data of a run goes into its state, by `Progress`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

from stepfleet.orchestrator.continuation import CanDecideToContinue
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import Content, Message
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import Progress


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """One answer of the model, and a record and a text of each of its calls, in call order."""

    response: LLMResponse
    records: tuple[ToolCallRecord, ...] = ()
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HandledCalls:
    """Records of the calls of a turn that need no tool, by index, and the progress they make."""

    records: Mapping[int, ToolCallRecord] = field(default_factory=dict)
    progress: Progress | None = None


class Reasoner:
    """Hooks around a model's turn; override the ones you need.

    `prepare` is called before each model call, `interpret` once per answer, `handle` before
    the turn's tools and `read` after them. A step that is repeated after a crash repeats all but
    `interpret`: they must return the same result each time.
    """

    async def prepare(self, request: ModelRequest, state: AgentState) -> ModelRequest:  # noqa: ARG002
        """Return the request to send instead of `request`. An exception fails the step."""
        return request

    def interpret(self, response: LLMResponse, state: AgentState) -> LLMResponse:  # noqa: ARG002
        """Return the answer to take and store, for example with calls that its text holds.

        Must not raise, since the call has been paid for: `read` reports a wrong answer.
        """
        return response

    def handle(self, response: LLMResponse, state: AgentState) -> HandledCalls | None:  # noqa: ARG002
        """Return the calls that are answered here and never run, and the progress they make.

        The model reads an error record of such a call; the step does not fail.
        """
        return None

    async def read(self, turn: ModelTurn, state: AgentState) -> Progress | None:  # noqa: ARG002
        """Return the progress that the turn makes. `state` is the state before it.

        An exception becomes an error of the step, which is stored with all that it did.
        """
        return None

    def criteria(self) -> tuple[CanDecideToContinue, ...]:
        """Return its criteria for whether the run goes on."""
        return ()


class ReasonerChain(Reasoner):
    """Several reasoners in order: requests pass through all, and each reads the turn.

    A call belongs to the first that handles it. Of two values for one field the later wins.
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
        """Return the calls that any of them handles."""
        return reduce(both, (one.handle(response, state) for one in self.reasoners), None)

    async def read(self, turn: ModelTurn, state: AgentState) -> Progress | None:
        """Return the progress that all of them make."""
        progress = None
        for one in self.reasoners:
            progress = joined(progress, await one.read(turn, state))
        return progress

    def criteria(self) -> tuple[CanDecideToContinue, ...]:
        """Return the criteria of all of them."""
        return tuple(criterion for one in self.reasoners for criterion in one.criteria())


def chain_of(*reasoners: Reasoner | None) -> Reasoner | None:
    """Return one reasoner for those that are not None; None where there is none."""
    there = [one for one in reasoners if one is not None]
    return ReasonerChain(*there) if len(there) > 1 else next(iter(there), None)


def both(first: HandledCalls | None, second: HandledCalls | None) -> HandledCalls | None:
    """Return the calls that either handles; a call belongs to `first`."""
    if first is None or second is None:
        return first or second
    records = {**second.records, **first.records}
    return HandledCalls(records, joined(first.progress, second.progress))


def joined(first: Progress | None, second: Progress | None) -> Progress | None:
    """Return both; of two values for one field `second` wins."""
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
        refused=second.refused or first.refused,
        is_preamble=first.is_preamble or second.is_preamble,
    )


def with_paragraph(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Return the messages with `text` as a paragraph of the system message, unless it has it."""
    first = messages[0] if messages else None
    if not text or (first and first.is_system() and text in first.text):
        return messages
    if first is None or not first.is_system():
        return (Message.system(text), *messages)
    if isinstance(first.content, str):
        content: Content = f"{first.content}\n\n{text}" if first.content else text
    else:
        content = [*first.content, {"text": f"\n\n{text}"}]
    return (first.model_copy(update={"content": content}), *messages[1:])
