"""The audit stream: who changed what from the dashboard. Knows no users, only their names."""

from typing import Any

from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.codec import moment
from stepfleet.orchestrator.store.gateway import Gateway, Opened

MOST_ENTRIES = 10_000
LONGEST = 500


class Audit(Gateway):
    """Writes and reads the audit stream of one store."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._key = opened.keys.of(keys.AUDIT)

    async def note(self, user: str, action: str, target: str, detail: str) -> None:
        """Add an entry; the oldest ones go. Raises `StoreError`."""
        fields = {"user": user, "action": action, "target": target, "detail": detail}
        flat = [part for name, text in fields.items() for part in (name, text[:LONGEST])]
        limits = ("MAXLEN", "~", MOST_ENTRIES)
        await self._connection.execute("XADD", self._key, *limits, "*", *flat)

    async def newest(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest entries, the newest first, each with its time `at`."""
        found = await self._connection.execute("XREVRANGE", self._key, "+", "-", "COUNT", limit)
        return [
            {"at": moment(place.partition("-")[0]).isoformat(), **fields} for place, fields in found
        ]
