"""Event envelopes: the output of a commit besides its state. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple

import orjson

from stepfleet.orchestrator.records.conversation.messages import value_text

CHANNEL = "agent."


class EventType(StrEnum):
    """The types on the wire."""

    STATUS = "agent.status"
    STEP_STARTED = "agent.step.started"
    STEP_COMPLETED = "agent.step.completed"
    STEP_RETRIED = "agent.step.retried"
    TOOL_STARTED = "agent.tool.started"
    TOOL_COMPLETED = "agent.tool.completed"
    STREAM_CHUNK = "agent.stream.chunk"
    CONTINUATION = "agent.continuation"
    ASKED = "agent.approval.requested"
    DECIDED = "agent.approval.decided"


class Event(NamedTuple):
    """One envelope; the store adds its sequence number and its id.

    `parent_agent_id` is set for runs that another run started.
    """

    type: EventType
    session_id: str
    execution_id: str
    timestamp: datetime
    payload: dict[str, Any]
    parent_agent_id: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the envelope without its number."""
        envelope = {
            "type": self.type.value,
            "session_id": self.session_id,
            "execution_id": self.execution_id,
            "timestamp": stamp(self.timestamp),
            "payload": self.payload,
        }
        if self.parent_agent_id is not None:
            envelope["parent_agent_id"] = self.parent_agent_id
        return envelope


class Events(tuple[Event, ...]):
    """Events of one write, in order."""

    __slots__ = ()


def numbered(events: list[dict[str, Any]], first: int, written: datetime) -> list[dict[str, Any]]:
    """Return stored envelopes of one write with their sequence numbers and ids.

    `first` is the number of the first one; `written` is Redis's time of the write, and the time of
    an event that a script has made.
    """
    return [
        {
            "sequence": first + offset,
            "event_id": f"{event.get('session_id', '')}:{first + offset}",
            "timestamp": stamp(written),
            **event,
        }
        for offset, event in enumerate(events)
    ]


def channel_of(session_id: str) -> str:
    """Return the channel on which a session's events are broadcast."""
    return CHANNEL + session_id


def status_payload(
    status: str,
    *,
    before: str | None,
    steps: int,
    error: str | None = None,
    last_response: str | None = None,
) -> dict[str, Any]:
    """Return the payload of `agent.status`. Scripts that change a status build the same."""
    return {
        "status": status,
        "previous_status": before,
        "step_count": steps,
        "error_message": error,
        "last_response": last_response,
    }


def stamp(moment: datetime) -> str:
    """Return a UTC time in ISO 8601 with milliseconds and `Z`."""
    # orjson takes a third of the time of `isoformat`, and each step writes four.
    moment = moment.astimezone(UTC)
    text = orjson.dumps(moment).decode()
    return f"{text[1:24]}Z" if moment.microsecond else f"{text[1:20]}.000Z"


def args_summary(arguments: Mapping[str, Any]) -> str:
    """Return the first three arguments as `key: value`, each value cut to 30 characters."""
    shown = []
    for key, value in list(arguments.items())[:3]:
        text = f'"{value}"' if isinstance(value, str) else value_text(value)
        shown.append(f"{key}: {_cut(text, 30)}")
    return ", ".join(shown)


def args_shown(arguments: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Return all arguments; those longer than `longest` characters become cut text."""
    texts = {key: value_text(value) for key, value in arguments.items()}
    return {
        key: value if len(texts[key]) <= longest else _cut(texts[key], longest)
        for key, value in arguments.items()
    }


def result_summary(result: Any) -> str | None:
    """Return a result as text of at most 100 characters; None stays None."""
    if result is None:
        return None
    return _cut(value_text(result), 100)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


class StreamedText:
    """The text of a run's model calls by step, folded from its chunks.

    A new attempt at a step starts its text anew; late chunks of an older attempt, and chunks
    that were seen before, change nothing.
    """

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._attempts: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self._open: set[int] = set()

    @property
    def text(self) -> str:
        """The text of the newest step."""
        return self._texts[max(self._texts)] if self._texts else ""

    @property
    def is_open(self) -> bool:
        """Whether the newest step's text is still being written."""
        return bool(self._texts) and max(self._texts) in self._open

    def is_whole(self, step: int) -> bool:
        """Return whether a step's text is known to its end; true for 0, before the first step."""
        return step == 0 or (step in self._texts and step not in self._open)

    def of(self, step: int) -> str:
        """Return the text of a step (from 1), as far as it is known."""
        return self._texts.get(step, "")

    def add(self, envelope: Mapping[str, Any]) -> bool:
        """Take an envelope of any type; return whether the text has changed."""
        if envelope["type"] != EventType.STREAM_CHUNK:
            return False
        chunk = envelope["payload"]
        step, attempt, index = chunk["step_number"], chunk["attempt"], chunk["chunk_index"]
        known = self._attempts.get(step, 0)
        if attempt < known or (attempt == known and index < self._next[step]):
            return False
        before = self.of(step) if attempt == known else ""
        is_new = before != self.of(step) or bool(chunk["chunk"])
        self._texts[step] = before + chunk["chunk"]
        self._attempts[step], self._next[step] = attempt, index + 1
        (self._open.discard if chunk["is_complete"] else self._open.add)(step)
        return is_new
