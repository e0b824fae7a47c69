"""Ended runs in files outside Redis, as a client sees them: move, look, bring back, verify."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepfleet.orchestrator.client.audit import changes
from stepfleet.orchestrator.client.session import FleetSession
from stepfleet.orchestrator.errors import ConfigurationError, NotFoundError
from stepfleet.orchestrator.records.archive import Archived, ArchiveFigures, ArchiveVerification
from stepfleet.orchestrator.records.batch import Manifest
from stepfleet.orchestrator.settings.settings import LONGEST_SECONDS
from stepfleet.orchestrator.store.runs.verifying import verified
from stepfleet.orchestrator.store.store import Store

NAMED = 5
"""Unknown ids that an error names, and ids that an entry of the audit names."""


def _moved(given: Mapping[str, Any], _: Any) -> str:
    if given["dry_run"]:
        return ""  # nothing is moved
    age = given["older_than"]
    return "ended runs" if age is None else f"runs that ended {age:g} s ago"


def _brought_back(given: Mapping[str, Any], _: Any) -> str:
    return f"archived {_some(given['ids'])}"


def _count_of(result: Archived) -> str:
    return f"done: {result.runs:,}"


def _ignore(_: int) -> None:
    pass


class AsyncFleetArchive:
    """Ended runs that were moved to files, in a folder or in object storage: `fleet.archive`.

    They are read as before: `fleet.runs.show`, results, lists. To change one, `restore` it first.
    """

    def __init__(self, session: FleetSession) -> None:
        self._session = session

    async def state(self) -> ArchiveFigures:
        """Return how much was moved, what is due, and since when moving fails."""
        return await (await self._session.store()).archiving.figures()

    @changes("archive", _moved, _count_of)
    async def move(
        self,
        *,
        older_than: float | None = None,
        dry_run: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> Archived:
        """Move runs that ended `older_than` seconds ago, now; by default `archive_after` seconds.

        Workers and keepers do it all the time. With `dry_run` it counts the runs that would go.
        `on_progress` receives the number of runs so far after each file. Runs whose end others are
        still to learn stay: `left`. Raises `ConfigurationError` where no archive is named here,
        `ConflictError` where another process is at it, `ArchiveError` where the archive fails:
        then what was not read back there is in Redis.
        """
        store = await self._session.store()
        after = store.settings.archive_after if older_than is None else older_than
        if not 0 <= after <= LONGEST_SECONDS:
            msg = f"older_than is {after}; write seconds from 0 to {LONGEST_SECONDS:,}"
            raise ConfigurationError(msg)
        if dry_run:
            return await store.archiving.due(after)
        report = on_progress or _ignore
        return await store.archiving.run(after, lambda done: report(done.runs))

    @changes("restore", _brought_back)
    async def restore(
        self, ids: Sequence[str], *, on_progress: Callable[[int], None] | None = None
    ) -> int:
        """Bring archived runs back, by ids of runs and of batches; return how many there were.

        Those that are not archived stay as they are. They are archived anew `archive_after`
        seconds later. `on_progress` receives the number so far. Raises `ConfigurationError` for no
        ids, `NotFoundError` that names unknown ones before any is brought back, `ArchiveError`,
        `SerializationError` or `ConfigurationError` where a file cannot be read.
        """
        if isinstance(ids, str) or not ids:
            raise ConfigurationError("ids is empty: write the ids of runs or batches, as a list")
        store, report = await self._session.store(), on_progress or _ignore
        run_ids, batches = await _found(store, ids)
        done = await store.returning.restore(run_ids)
        for one in batches:
            report(done)
            done += await store.returning.restore_batch(one)
        return done

    async def verify(
        self, *, on_progress: Callable[[int], None] | None = None
    ) -> ArchiveVerification:
        """Read each file of the archive, and return what is missing or damaged, with its runs.

        `on_progress` receives the number of files so far. Raises `ArchiveError` or
        `ConfigurationError` where the archive cannot be used at all.
        """
        return await verified(await self._session.store(), on_progress or _ignore)


async def _found(store: Store, ids: Sequence[str]) -> tuple[list[str], list[Manifest]]:
    """Return the runs and the batches of these ids. Raises `NotFoundError` for unknown ones."""
    named = list(dict.fromkeys(ids))
    manifests = {one: await store.batches.find(one) for one in named}
    batches = [manifest for manifest in manifests.values() if manifest]
    runs = [one for one in named if not manifests[one]]
    archived = await store.reads.archived.where(runs)
    others = [one for one in runs if one not in archived]
    there = zip(others, await store.batches.statuses(others), strict=True)
    if unknown := [one for one, status in there if status is None]:
        msg = f"no run and no batch has the id {_some(unknown)}; 'stepfleet ls' lists runs"
        raise NotFoundError(msg)
    return list(archived), batches


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    return ", ".join(ids[:NAMED]) + more
