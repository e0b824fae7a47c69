"""The conditions on runs that a list shows, as callers write them. Pure."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import TypedDict, TypeVar

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.base import well_formed
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.store.records.codec import EPOCH
from stepfleet.orchestrator.store.runs.listing import RunFilter

E = TypeVar("E", bound=StrEnum)
LONGEST_CONDITION = 500


class RunConditions(TypedDict, total=False):
    """Which runs `fleet.runs.page` lists."""

    status: Lifecycle | str | None
    stop_reason: StopReason | str | None
    agent: str | None
    batch: str | None
    where: str | None
    tenant: str | None
    parent: str | None
    error: str | None
    since: datetime | str | None


def run_filter(which: RunConditions) -> RunFilter:
    """Return the conditions but the batch. Raises `ConfigurationError` that names the field."""
    texts = [("agent", which.get("agent")), ("tenant", which.get("tenant"))]
    texts += [("parent", which.get("parent")), ("error", which.get("error"))]
    for name, text in texts:
        if text is not None and (len(text) > LONGEST_CONDITION or text != well_formed(text)):
            msg = f"{name}: write at most {LONGEST_CONDITION} characters of valid text"
            raise ConfigurationError(msg)
    return RunFilter(
        status=_one_of(Lifecycle, "status", which.get("status")),
        stop_reason=_one_of(StopReason, "stop_reason", which.get("stop_reason")),
        agent=which.get("agent"),
        tenant=which.get("tenant"),
        parent=which.get("parent"),
        error=which.get("error"),
        since=_time("since", which.get("since")),
    )


def _one_of(kind: type[E], field: str, name: str | None) -> E | None:
    try:
        return None if name is None else kind(name)
    except ValueError:
        msg = f"{field}: there is no {ascii(name)[:60]}; write one of {', '.join(kind)}"
        raise ConfigurationError(msg) from None


def _time(field: str, given: datetime | str | None) -> datetime | None:
    """Return a time; one without a zone is UTC."""
    try:
        at = datetime.fromisoformat(given) if isinstance(given, str) else given
        at = at.replace(tzinfo=UTC) if at and at.tzinfo is None else at
        return max(at.astimezone(UTC), EPOCH) if at else None
    except (ValueError, OverflowError):
        msg = f"{field} is {ascii(given)[:60]}; write a time as 2026-11-23 or 2026-11-23T08:30Z"
        raise ConfigurationError(msg) from None
