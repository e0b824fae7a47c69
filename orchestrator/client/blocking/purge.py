"""The verb that removes ended runs, for plain code. Holds no logic: `fleet_purge` has it."""

from collections.abc import Callable, Sequence

from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.client.portal import Portal


class SyncPurge:
    """See `FleetPurge` for what the verb does."""

    _fleet: AsyncFleet
    _portal: Portal

    def purge(
        self,
        *,
        batch: str | None = None,
        statuses: Sequence[str] = (),
        older_than: float = 0.0,
        dry_run: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> int:
        """Remove ended runs with all that is kept of them; return how many it was."""
        work = self._fleet.purge(
            batch=batch,
            statuses=statuses,
            older_than=older_than,
            dry_run=dry_run,
            on_progress=on_progress,
        )
        return self._portal.call(work)
