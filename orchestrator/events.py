"""Event envelopes: what happened in a run, as the commit's own output. Pure."""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import orjson

from stepfleet.orchestrator.records.tool_text import value_text


class EventType(StrEnum):
    """The types on the wire."""

    STATUS = "agent.status"
    STEP_STARTED = "agent.step.started"
    STEP_COMPLETED = "agent.step.completed"
    STEP_RETRIED = "agent.step.retried"
    TOOL_STARTED = "agent.tool.started"
    TOOL_COMPLETED = "agent.tool.completed"


@dataclass(frozen=True, slots=True)
class Event:
    """One envelope; the store adds its sequence number."""

    type: EventType
    session_id: str
    execution_id: str
    timestamp: datetime
    payload: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the envelope as it is stored."""
        return {
            "type": self.type.value,
            "session_id": self.session_id,
            "execution_id": self.execution_id,
            "timestamp": stamp(self.timestamp),
            "payload": self.payload,
        }


class Events(tuple[Event, ...]):
    """Events of one write, in order."""

    __slots__ = ()

    def to_json(self) -> str:
        """Return the list as it is stored; empty text for no events."""
        return orjson.dumps([event.to_dict() for event in self]).decode() if self else ""


def stamp(moment: datetime) -> str:
    """Return a UTC time in ISO 8601 with milliseconds and `Z`."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def args_summary(arguments: dict[str, Any]) -> str:
    """Return the first three arguments as `key: value`, each value cut to 30 characters."""
    shown = []
    for key, value in list(arguments.items())[:3]:
        text = f'"{value}"' if isinstance(value, str) else value_text(value)
        shown.append(f"{key}: {_cut(text, 30)}")
    return ", ".join(shown)


def result_summary(result: Any) -> str | None:
    """Return a result as text of at most 100 characters; None stays None."""
    if result is None:
        return None
    return _cut(value_text(result), 100)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
