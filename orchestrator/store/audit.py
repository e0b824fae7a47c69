"""The audit stream: who changed what, from where. Knows no users, only their names.

The version before refuses entries with further fields, so `source` and `host` end the detail.
"""

import re
from collections.abc import Mapping
from typing import Any

from stepfleet.orchestrator.records.audit import Actor, AuditEntry
from stepfleet.orchestrator.records.base import well_formed
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.codec import moment
from stepfleet.orchestrator.store.gateway import Gateway, Opened

MOST_ENTRIES = 10_000
LONGEST = 500
_ORIGIN = re.compile(r"(.*) \[by ([^\[\]]+) on ([^\[\] ]+)\]", re.DOTALL)
_NO_ORIGIN = re.compile(r"[\[\]\s]+")
_LONGEST_ORIGIN = 100
Place = str
"""An entry's id in the stream."""


class Audit(Gateway):
    """Writes and reads the audit stream of one store."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._key = opened.keys.of(keys.AUDIT)

    async def note(self, who: Actor, action: str, target: str, detail: str) -> None:
        """Add an entry, at the server's time; the oldest ones go. Raises `StoreError`."""
        source, host = _plain(who.source, " "), _plain(who.host, "-")
        fields = {"user": who.user, "action": action, "target": target}
        flat = [part for name, text in fields.items() for part in (name, text[:LONGEST])]
        flat += ["detail", f"{detail[:LONGEST]} [by {source} on {host}]"]
        limits = ("MAXLEN", "~", MOST_ENTRIES)
        await self._connection.execute("XADD", self._key, *limits, "*", *map(well_formed, flat))

    async def newest(self, limit: int, before: Place = "+") -> list[tuple[Place, AuditEntry]]:
        """Return up to `limit` entries with their places, the newest first; those `before` one."""
        last = before if before == "+" else f"({before}"
        found = await self._connection.execute("XREVRANGE", self._key, last, "-", "COUNT", limit)
        return [(place, _entry(place, fields)) for place, fields in found]

    async def after(self, place: Place, limit: int) -> list[tuple[Place, AuditEntry]]:
        """Return up to `limit` entries after a place, the oldest first."""
        first = f"({place}"
        found = await self._connection.execute("XRANGE", self._key, first, "+", "COUNT", limit)
        return [(place, _entry(place, fields)) for place, fields in found]


def _plain(text: str, between: str) -> str:
    return _NO_ORIGIN.sub(between, text.strip())[:_LONGEST_ORIGIN] or "unknown"


def _entry(place: Place, fields: Mapping[str, Any]) -> AuditEntry:
    """Return a stored entry. Fields of later versions are left out."""
    known = {name: str(fields.get(name, "")) for name in ("user", "action", "target", "detail")}
    if origin := _ORIGIN.fullmatch(known["detail"]):
        known |= {"detail": origin[1], "source": origin[2], "host": origin[3]}
    at = moment(place.partition("-")[0]).isoformat()
    return AuditEntry(at=at, **known)
