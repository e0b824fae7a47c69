"""How many calls wait for people, as one who waits for their runs reads it, and what lists them.

Reads for a wait that has no progress; changes nothing.
"""

from collections.abc import Awaitable, Callable, Sequence

from stepfleet.orchestrator.store.store import Store

People = Callable[[], Awaitable[str]]
"""Reads what waits for people of that which is waited for; an empty text where nothing does."""


def people_of_batch(store: Store, batch_id: str) -> People:
    """Return what reads the calls of a batch that wait for people."""

    async def read() -> str:
        found = await store.approvals.count_of_batch(batch_id)
        return f"{found}: stepfleet approvals --batch {batch_id}" if found.count else ""

    return read


def people_of_runs(store: Store, run_ids: Callable[[], Sequence[str]]) -> People:
    """Return what reads the calls that wait for people of these runs, and of those below them."""

    async def read() -> str:
        found = await store.approvals.count_of_runs(run_ids())
        return f"{found}: stepfleet approvals" if found.count else ""

    return read
