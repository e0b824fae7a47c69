"""The interface of a reasoning strategy: an agent's record of its turns, and when it goes on.

One object serves all runs of an agent at once, so it holds options and never a run's data: that
lives in `AgentState.strategy_state`, which moves with the run from worker to worker and begins
empty with each execution.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.conversation.blocks import RESULT
from stepfleet.orchestrator.records.conversation.messages import Block, Message
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.state import AgentState

_PLACE = re.compile(r"\{\{\s*(prompt|history)\s*\}\}|\{(prompt|history)\}")


def checked_template(template: str) -> str:
    """Return `template`; raises `ValueError` where it has no place for the prompt."""
    if "prompt" not in {first or second for first, second in _PLACE.findall(template)}:
        raise ValueError("it has no place for the prompt; put {prompt} into it")
    return template


Template = Annotated[str, AfterValidator(checked_template)]


def rendered(template: str, prompt: str, history: Iterable[Any]) -> str:
    """Return `template` with `{prompt}` and `{history}` (or `{{ ... }}`) filled in."""
    values = {"prompt": prompt, "history": history_text(history)}
    return _PLACE.sub(lambda found: values[found[1] or found[2]], template)


def history_text(history: Iterable[Any]) -> str:
    """Return a history as text: an entry per paragraph, its filled fields a line each."""
    return "\n\n".join(_entry(one) for one in history)


def with_prompt(
    messages: tuple[Message, ...], template: str, history: Iterable[Any]
) -> tuple[Message, ...]:
    """Return the messages with the newest prompt of a user worded by `template`."""
    place = _place_of_prompt(messages)
    if place is None:
        return messages
    worded = _worded(messages[place], template, history)
    return (*messages[:place], worded, *messages[place + 1 :])


def prompt_of(messages: tuple[Message, ...]) -> str:
    """Return the text of the newest prompt of a user; "" where there is none."""
    place = _place_of_prompt(messages)
    return "" if place is None else messages[place].text


def _place_of_prompt(messages: tuple[Message, ...]) -> int | None:
    places = range(len(messages) - 1, -1, -1)
    return next((n for n in places if messages[n].is_prompt()), None)


def _worded(message: Message, template: str, history: Iterable[Any]) -> Message:
    text = rendered(template, message.text, history)
    if isinstance(message.content, str):
        return message.model_copy(update={"content": text})
    media = [block for block in message.content if "text" not in block]
    return message.model_copy(update={"content": [{"text": text}, *media]})


def _entry(entry: Any) -> str:
    if not isinstance(entry, Mapping):
        return _value(entry)
    return "\n".join(
        f"{name}: {_value(value)}" for name, value in entry.items() if value not in (None, "")
    )


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def result_blocks(records: Sequence[ToolCallRecord], texts: Sequence[str]) -> tuple[Block, ...]:
    """Return one `toolResult` block per call, in call order."""
    return tuple(
        {
            RESULT: {
                "toolUseId": record.call_id,
                "content": [{"text": text}],
                "status": "error" if record.is_error else "success",
            }
        }
        for record, text in zip(records, texts, strict=True)
    )


def observation_of(blocks: Sequence[Block], limit: int) -> str | None:
    """Return the texts of the results, each at most `limit` characters; None without results."""
    if not blocks:
        return None
    return "\n".join(_shortened(_text(block), limit) for block in blocks)


def text_field(parsed: Mapping[str, Any], name: str) -> str:
    """Return a field as text: "" where it is missing, JSON where it is not text."""
    value = parsed.get(name)
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def says_yes(value: Any) -> bool:
    """Return whether a field means true; models write it as text as well."""
    return value is True or (isinstance(value, str) and value.strip().lower() in {"true", "yes"})


def action_of(calls: Sequence[ToolCall]) -> Any:
    """Return the calls as a history keeps them: None, the only one, or a list."""
    actions = [{"tool": call.name, "arguments": call.arguments} for call in calls]
    if len(actions) > 1:
        return actions
    return actions[0] if actions else None


def _text(block: Block) -> str:
    content = block.get(RESULT, {}).get("content", ())
    return "".join(str(part["text"]) for part in content if "text" in part)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit} more)"


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
        """Return the message for a model that must go on and called no tool."""
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
