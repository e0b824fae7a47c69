"""Slim snapshots: a run's state as a small dict for a database or a user interface, and back.

Texts are cut and old messages left out, so a snapshot is for looking at a run and for going on
from its gist; the exact form is a checkpoint. Steps are diagnostic and are not read back.
"""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_jsonable_python

from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import Block, Content, Message
from stepfleet.orchestrator.records.errors import ErrorContext
from stepfleet.orchestrator.records.outcome import brief
from stepfleet.orchestrator.records.state import AgentState, Lifecycle, StateInfo
from stepfleet.orchestrator.records.steps import StepResult, StepType
from stepfleet.orchestrator.records.text.validation import explain_invalid
from stepfleet.orchestrator.records.usage import UsageStats

NOT_IN_HANDOFF = frozenset({"messages", "tool_results", "last_continuation_outcome", "status"})
"""Held elsewhere: messages and tool results in the log, outcome and status next to the state."""
_EXCLUDED = set(NOT_IN_HANDOFF)


def handoff(state: AgentState) -> str:
    """Return the hand-off form of a state (JSON): everything but what is held elsewhere."""
    return state.json_without(_EXCLUDED)


class SlimSerializationConfig(Record):
    """Limits of a snapshot; the defaults are the standard preset.

    The newest `max_messages` messages and `max_steps` steps are kept, none for a limit of 0 or
    less. Text above `max_content_length` characters is cut and marked `...`.
    """

    max_messages: int = 50
    max_steps: int = 20
    max_content_length: int = 2000
    include_tool_results: bool = True
    include_steps: bool = True
    include_continuation_trace: bool = False
    redact_tool_args: bool = False

    @classmethod
    def minimal(cls) -> Self:
        """Return the preset for lists of many runs: a few short messages, no steps, no results."""
        return cls(
            max_messages=20,
            max_steps=0,
            max_content_length=500,
            include_tool_results=False,
            include_steps=False,
        )

    @classmethod
    def standard(cls) -> Self:
        """Return the preset for a user interface or a database."""
        return cls()

    @classmethod
    def full(cls) -> Self:
        """Return the preset for looking into a run, with the newest decision."""
        return cls(
            max_messages=100,
            max_steps=50,
            max_content_length=5000,
            include_continuation_trace=True,
        )

    @property
    def kept_steps(self) -> int:
        """How many steps are kept."""
        return max(self.max_steps, 0) if self.include_steps else 0

    @property
    def kept_messages(self) -> int:
        """How many messages are kept."""
        return max(self.max_messages, 0)


MARK = "..."
OMITTED_RESULT = "[tool result omitted]"


def newest_messages(messages: Sequence[Message], limit: int) -> tuple[Message, ...]:
    """Return at most `limit` messages: the instructions in front, then the newest ones.

    A result whose call is no longer there is left out too.
    """
    if limit <= 0:
        return ()
    if len(messages) <= limit:
        return tuple(messages)
    head = next((i for i, one in enumerate(messages) if not one.is_system()), len(messages))
    pinned = messages[: min(head, limit)]
    first = max(len(messages) - (limit - len(pinned)), head)
    while first < len(messages) and messages[first].is_tool():
        first += 1
    return (*pinned, *messages[first:])


def shortened(content: Content, limit: int) -> Content:
    """Return content whose texts have at most `limit` characters in all, cut ones marked."""
    if isinstance(content, str):
        return cut(content, limit)
    left, kept = limit, []
    for block in content:
        if not isinstance(block.get("text"), str):
            kept.append(_small(block, limit))
        elif left > 0:
            kept.append({**block, "text": cut(block["text"], left)})
            left -= len(block["text"])
    return kept


def cut(text: str, limit: int) -> str:
    """Return `text`, or its first `limit` characters and the mark."""
    return text if len(text) <= limit else text[: max(limit, 0)] + MARK


def shortened_arguments(value: Any, limit: int) -> Any:
    """Return a call's arguments with each text in them cut."""
    match value:
        case str():
            return cut(value, limit)
        case dict():
            return {name: shortened_arguments(one, limit) for name, one in value.items()}
        case list():
            return [shortened_arguments(one, limit) for one in value]
        case _:
            return value


def _small(block: Block, limit: int) -> Block:
    """Return a block of another kind, or a note that it was too large to keep."""
    if len(json.dumps(block, ensure_ascii=False, default=str)) <= limit:
        return dict(block)
    kind = next(iter(block), "content")
    return {"text": f"[{kind} omitted]"}


CALLS, CALL_ID, TOOL_NAME, NAME = "tool_calls", "tool_call_id", "tool_name", "name"
UNKNOWN = "unknown"


def slim_message(message: Message, config: SlimSerializationConfig) -> dict[str, Any]:
    """Return a message as a snapshot has it."""
    if message.is_tool() and not config.include_tool_results:
        content: Any = OMITTED_RESULT
    else:
        content = shortened(message.content, config.max_content_length)
    return {"role": message.role.value, "content": content, "metadata": _metadata(message, config)}


def whole_message(data: Mapping[str, Any]) -> Message:
    """Return the message that a snapshot has. Raises `pydantic.ValidationError`."""
    metadata = dict(data.get("metadata") or {})
    fields = {name: value for name, value in data.items() if name != "metadata"}
    if data.get("role") == "assistant" and isinstance(metadata.get(CALLS), list):
        fields[CALLS] = tuple(_whole_call(one) for one in metadata.pop(CALLS))
    if data.get("role") == "tool":
        fields[CALL_ID] = metadata.pop(CALL_ID, None)
        fields[NAME] = metadata.pop(TOOL_NAME, None)
    elif NAME in metadata:
        fields[NAME] = metadata.pop(NAME)
    return Message.model_validate({**fields, "metadata": metadata})


def slim_calls(calls: Iterable[ToolCallRecord]) -> list[dict[str, str]]:
    """Return the calls of a step by id and name."""
    return [{"id": call.call_id, "name": call.tool_name} for call in calls]


def _metadata(message: Message, config: SlimSerializationConfig) -> dict[str, Any]:
    metadata = copy.deepcopy(message.metadata)
    if message.tool_calls:
        metadata[CALLS] = [_call(call, config.max_content_length) for call in message.tool_calls]
    if config.redact_tool_args and isinstance(metadata.get(CALLS), list):
        metadata[CALLS] = [_redacted(call) for call in metadata[CALLS]]
    if message.is_tool():
        metadata[CALL_ID] = message.tool_call_id
        metadata[TOOL_NAME] = message.name
    elif message.name is not None:
        metadata[NAME] = message.name
    return metadata


def _call(call: ToolCall, limit: int) -> dict[str, Any]:
    entry = {
        "id": call.id,
        "name": call.name,
        "arguments": shortened_arguments(copy.deepcopy(call.arguments), limit),
    }
    return entry if call.error is None else {**entry, "error": call.error}


def _redacted(call: Any) -> dict[str, Any]:
    """Return only id and name of a call, also of one in a provider's form."""
    entry = call if isinstance(call, Mapping) else {}
    function = entry.get("function")
    inner = function.get("name") if isinstance(function, Mapping) else None
    return {"id": entry.get("id"), "name": entry.get("name") or inner or UNKNOWN}


def _whole_call(entry: Any) -> Any:
    """Return the readable form of a call: ours, or a provider's by its id and name."""
    if not isinstance(entry, Mapping) or "function" not in entry:
        return entry
    return {"id": entry.get("id"), "name": _redacted(entry)["name"]}


VERSION = 1
"""Version of snapshots. Readers accept this one and the one before it."""
OLDEST_READABLE = VERSION - 1


class CanSerializeAgentState(Protocol):
    """Converts a state into JSON data and back."""

    def serialize(self, state: AgentState) -> dict[str, Any]:
        """Return the state as JSON data."""

    def deserialize(self, data: Mapping[str, Any]) -> AgentState:
        """Return the state that `data` holds."""


class SlimSerializer:
    """Serializes states by a `SlimSerializationConfig`, the standard one if none is given."""

    def __init__(self, config: SlimSerializationConfig | None = None) -> None:
        self.config = config or SlimSerializationConfig.standard()

    def serialize(self, state: AgentState, steps: Sequence[StepResult] = ()) -> dict[str, Any]:
        """Return the snapshot of a state; `steps` are those that the run has committed."""
        config = self.config
        kept = newest_messages(state.messages, config.kept_messages)
        recent = steps[-config.kept_steps :] if config.kept_steps else ()
        info, failures = state.info, state.failures
        outcome = state.last_continuation_outcome if config.include_continuation_trace else None
        return {
            "version": VERSION,
            "agent_id": state.agent_id,
            "parent_agent_id": state.parent_agent_id,
            "status": state.status.value,
            "step_count": state.step_count,
            "usage": _usage(state.usage),
            "execution": {
                "number": info.execution,
                "started_at": info.started_at.isoformat(),
                "updated_at": info.updated_at.isoformat(),
                "cumulative_seconds": info.cumulative_execution_seconds,
            },
            "failures": failures.model_dump(mode="json", exclude_defaults=True),
            "messages": [slim_message(message, config) for message in kept],
            "steps": [_step(step) for step in recent],
            "last_continuation": brief(outcome) if outcome else None,
            "metadata": to_jsonable_python(state.metadata),
        }

    def deserialize(self, data: Mapping[str, Any]) -> AgentState:
        """Return the state of a snapshot: ids, counters, clocks, and the messages it kept.

        Reads this version, the one before, and snapshots without a version. Raises
        `SerializationError` for a newer one, or for anything else.
        """
        _check_version(data.get("version", OLDEST_READABLE))
        try:
            snapshot = _Snapshot.model_validate(dict(data))
            messages = tuple(whole_message(one) for one in snapshot.messages)
        except ValidationError as error:
            msg = f"this is not a snapshot of a run: {explain_invalid(error)}"
            raise SerializationError(msg) from error
        return _state(snapshot, messages)


class _Execution(BaseModel):
    model_config = ConfigDict(extra="forbid")

    number: int = 1
    started_at: datetime
    updated_at: datetime
    cumulative_seconds: float = 0.0


class _Snapshot(BaseModel):
    """The shape of a snapshot as it is read."""

    model_config = ConfigDict(extra="forbid")

    version: int = OLDEST_READABLE
    agent_id: str
    parent_agent_id: str | None = None
    status: Lifecycle
    step_count: int = Field(default=0, ge=0)
    usage: dict[str, int] = Field(default_factory=dict)
    execution: _Execution
    failures: ErrorContext = Field(default_factory=ErrorContext)
    messages: list[dict[str, Any]] = Field(default_factory=list)
    steps: list[dict[str, Any]] = Field(default_factory=list)
    last_continuation: dict[str, Any] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


def _check_version(version: Any) -> None:
    if isinstance(version, int) and OLDEST_READABLE <= version <= VERSION:
        return
    msg = (
        f"field 'version' of the snapshot is {version!r}; this version of Stepfleet reads "
        f"{OLDEST_READABLE} and {VERSION}: upgrade Stepfleet"
    )
    raise SerializationError(msg)


def _usage(usage: UsageStats) -> dict[str, int]:
    return {
        "prompt": usage.prompt_tokens,
        "completion": usage.completion_tokens,
        "total": usage.total_tokens,
    }


def _step(step: StepResult) -> dict[str, Any]:
    return {
        "step_number": step.step,
        "type": "final" if step.type is StepType.FINAL_RESPONSE else step.type.value,
        "has_tool_calls": step.has_tool_calls,
        "finish_reason": step.finish_reason.value,
        "errors": len(step.errors),
        "usage": {"total": step.usage.total_tokens if step.usage else 0},
        "duration_ms": step.duration_ms,
        "tool_calls": slim_calls(step.tool_calls),
    }


def _state(snapshot: _Snapshot, messages: tuple[Message, ...]) -> AgentState:
    times, number = snapshot.execution, snapshot.execution.number
    usage = UsageStats(
        prompt_tokens=snapshot.usage.get("prompt", 0),
        completion_tokens=snapshot.usage.get("completion", 0),
        total_tokens=snapshot.usage.get("total", 0),
    )
    return AgentState(
        agent_id=snapshot.agent_id,
        parent_agent_id=snapshot.parent_agent_id,
        info=StateInfo(
            id=snapshot.agent_id,
            execution_id=f"{snapshot.agent_id}:{number}",
            execution=number,
            started_at=times.started_at,
            updated_at=times.updated_at,
            cumulative_execution_seconds=times.cumulative_seconds,
        ),
        status=snapshot.status,
        messages=messages,
        step_count=snapshot.step_count,
        session_steps=snapshot.step_count,
        usage=usage,
        session_usage=usage,
        failures=snapshot.failures,
        metadata=snapshot.metadata,
    )
