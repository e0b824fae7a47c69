"""Tools that ship with the fleet, ready for an agent's list of tools."""

from datetime import datetime
from typing import Any, NoReturn
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from stepfleet.orchestrator.errors import ConfigurationError, ToolArgumentsError
from stepfleet.orchestrator.records.calls.answers import Awaited
from stepfleet.orchestrator.tools.builtin.arithmetic import calculator
from stepfleet.orchestrator.tools.builtin.web import http_get, http_get_from
from stepfleet.orchestrator.tools.definition import Tool, tool

__all__ = ["ask_person", "calculator", "current_time", "http_get", "http_get_from"]


@tool(name="ask_person", idempotent=True, queue=Awaited.PERSON)
def _ask(question: str, options: list[str] | None = None) -> NoReturn:
    """Ask a person, and wait for the answer, however long it takes.

    Args:
        question: What you need to know, so that somebody can answer who has not seen the rest.
        options: The possible answers, if it must be one of them.
    """
    del question, options
    raise ConfigurationError("ask_person is answered by `stepfleet answer`, on a fleet")


ask_person: Tool[..., Any] = _ask


@tool(read_only=True)
def current_time(timezone: str = "UTC") -> str:
    """Return the current date and time as ISO 8601 text with the offset from UTC.

    Args:
        timezone: Name of a time zone in the IANA database, for example Europe/Berlin.
    """
    try:
        zone = ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        # OSError: a name such as "Europe", which is a folder of the database.
        raise ToolArgumentsError(
            f"current_time: the time zone {timezone[:100]!r} is not known; use a name of the IANA "
            "database such as Europe/Berlin, or UTC"
        ) from None
    return datetime.now(zone).isoformat(timespec="seconds")
