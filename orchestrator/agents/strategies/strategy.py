"""The interface of a reasoning strategy: an agent's record of its turns, and when it goes on.

One object serves all runs of an agent at once, so it holds options and never a run's data: that
lives in `AgentState.strategy_state`, which moves with the run from worker to worker and begins
empty with each execution.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import Block, Message
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.state import AgentState


class OutputMode(StrEnum):
    """The form of a model's answers.

    `text`: prose, with tools called natively. `json`: one JSON object per answer, in which an
    `action` names the tool to call; it needs no tool calling of the model.
    """

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class StrategyContext:
    """The turn that a strategy processes.

    `step` counts the session's steps from 1, `iteration` those of this execution. `calls` has
    a record in `records` and a text, as the model reads it, in `texts`, each in call order.
    """

    run_id: str
    step: int
    iteration: int
    response: LLMResponse
    calls: tuple[ToolCall, ...] = ()
    records: tuple[ToolCallRecord, ...] = ()
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StateChange:
    """The changes of a turn: keys that are set, and items that are appended to lists.

    `strategy` is merged into `strategy_state` and `custom` into `custom_state`; `append` names
    lists of `strategy_state`. Appending writes only the new items to the run's log. All values
    are JSON data.
    """

    strategy: Mapping[str, Any] = field(default_factory=dict)
    append: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    custom: Mapping[str, Any] = field(default_factory=dict)


class Strategy(ABC):
    """A way to reason. Subclass it, or name a built-in one: `Agent(strategy="react")`.

    `mode` is the form of the model's answers; `modes` are those that a strategy can read. Raises
    `ConfigurationError` for another one.
    """

    modes: ClassVar[frozenset[OutputMode]] = frozenset(OutputMode)
    default_mode: ClassVar[OutputMode] = OutputMode.TEXT

    def __init__(self, *, mode: OutputMode | str | None = None) -> None:
        self.mode = self._checked(self.default_mode if mode is None else mode)

    @abstractmethod
    async def process_step(
        self,
        parsed_output: Any,
        tool_result_blocks: Sequence[Block],
        state: AgentState,
        context: StrategyContext,
    ) -> StateChange | None:
        """Return the changes of a turn; `state` is the one before the turn.

        `parsed_output` is the answer's text, or in JSON mode its object. `tool_result_blocks`
        are the `toolResult` blocks of the turn's calls.
        """

    @abstractmethod
    def should_continue(self, parsed_output: Any) -> bool:
        """Return whether another step follows this answer, tools or not."""

    @abstractmethod
    def get_history(self, state: AgentState) -> list[Any]:
        """Return the entries of this execution."""

    def prepare_messages(
        self,
        messages: tuple[Message, ...],
        state: AgentState,
    ) -> tuple[Message, ...]:
        """Return the messages to send; the stored conversation stays as it is."""
        return messages

    def instructions(self) -> str:
        """Return the instructions for the form of answers; may be empty."""
        return ""

    def answer(self, parsed_output: Any) -> str | None:
        """Return the answer for people, or None where the output is that already."""
        if isinstance(parsed_output, Mapping):
            text = parsed_output.get("answer")
            return text if isinstance(text, str) else None
        return None

    def nudge(self) -> str:
        """Return the message for a model that shall go on and called no tool."""
        return "Go on with the next step."

    def _checked(self, mode: OutputMode | str) -> OutputMode:
        name = type(self).__name__
        try:
            known = OutputMode(mode)
        except ValueError:
            known = None
        if known is None or known not in self.modes:
            able = " or ".join(repr(one.value) for one in OutputMode if one in self.modes)
            msg = f"strategy {name}: mode {str(mode)!r} does not fit it; give {able}"
            raise ConfigurationError(msg)
        return known
