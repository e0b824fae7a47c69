"""The time of day, by the worker's clock."""

from datetime import datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from stepfleet.orchestrator.errors import ToolArgumentsError
from stepfleet.orchestrator.tools.definition import tool


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
