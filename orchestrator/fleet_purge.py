"""What a client removes: ended runs, before their retention is over."""

import math
from collections.abc import Callable, Sequence

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.fleet_connection import FleetConnection
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.settings import LONGEST_SECONDS
from stepfleet.orchestrator.store.purging import Purge, Purging

ENDS = tuple(one.value for one in Lifecycle if one.is_terminal)


class FleetPurge(FleetConnection):
    """The verb that removes ended runs."""

    async def purge(
        self,
        *,
        batch: str | None = None,
        statuses: Sequence[str] = (),
        older_than: float = 0.0,
        dry_run: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> int:
        """Remove ended runs with all that is kept of them; return how many it was.

        Without conditions that is every ended run; `batch` takes those of one batch, `statuses`
        those of some end states (`completed`, `stopped`, ...), `older_than` those that ended so
        many seconds ago. A batch counts them on, as it does expired ones; one that is purged whole
        and has no open runs is forgotten. With `dry_run` nothing is removed. `on_progress` hears
        after each page how many it was so far. Works while Redis is full; open runs stay.
        Raises `ConfigurationError` for an unknown batch or state.
        """
        for status in statuses:
            if status not in ENDS:
                msg = f"no run ends as {status!r}; write one of {', '.join(ENDS)}"
                raise ConfigurationError(msg)
        if not 0 <= older_than <= LONGEST_SECONDS or math.isnan(older_than):
            msg = f"older_than is {older_than}; write seconds from 0 to {LONGEST_SECONDS:,}"
            raise ConfigurationError(msg)
        client = await self._open()
        if batch is not None:
            await client.batches.get(batch)
        store = client.store
        purging = Purging(store.connection, store.keys, client.batches)
        done = 0
        async for done in purging.purge(Purge(batch, tuple(statuses), older_than, dry_run)):
            if on_progress is not None:
                on_progress(done)
        return done
