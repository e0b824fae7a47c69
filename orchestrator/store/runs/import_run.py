"""Creates runs that begin with a log: forks, and runs read from checkpoints. All or nothing."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ResponseError

from stepfleet.orchestrator.errors import ConflictError, StoreError
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.protocol.serialization import handoff
from stepfleet.orchestrator.records.state import AgentState, Lifecycle
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.dispatch import Dispatch
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import RunScripts, flat
from stepfleet.orchestrator.store.records.codec import log_end
from stepfleet.orchestrator.store.records.compression import unpacked
from stepfleet.orchestrator.store.records.events import status_event, stored_events
from stepfleet.orchestrator.store.runs.submission import NewRun, header_of

PAGE_FIELDS, PAGE_BYTES = 400, 256 * 1024
"""The part of a log that one script writes, while Redis serves nobody else; the rest is staged."""
STAGED_SECONDS = 600
"""How long a staged page waits for the next, where a client has died."""
_TRIES = 3
_STAGED = ("log", "outcomes", "lost")
_AT_WORK = (Lifecycle.QUEUED, Lifecycle.IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """A run to create with a history.

    `log`, `outcomes` and `lost` are fields as they are stored; `step` is the step at which the
    run goes on, or stands. `header` are further fields of the header (times in milliseconds).
    """

    run: NewRun
    state: AgentState
    step: int
    log: Mapping[str, str]
    outcomes: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    header: Mapping[str, Any] = field(default_factory=dict)


class RunImport:
    """Creates runs with a history, each by one call; long parts are staged before."""

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        dispatch: Dispatch,
        *,
        grace: float,
        retention: int,
    ) -> None:
        self._connection = connection
        self._scripts = RunScripts(connection, keys)
        self._pushing = RunScripts(connection, keys, dispatch.queue_key)
        self._dispatch = dispatch
        self._grace_ms = round(grace * 1000)
        self._retention = retention

    async def create(self, imported: ImportedRun) -> bool:
        """Create the run; return False if the very same was created before.

        Raises `ConflictError` if another run has its id, `StoreError` when Redis stays out
        of reach or refuses because its memory is full.
        """
        try:
            outcome = await self._create(imported)
        except ResponseError as error:
            msg = f"Redis refuses a new run: {error}; raise its maxmemory, or remove ended runs"
            raise StoreError(msg) from None
        if outcome == "exists":
            msg = (
                f"a run of the id {imported.run.run_id} is there already; "
                "choose another id (uuid.uuid4()) for this one"
            )
            raise ConflictError(msg)
        # Also after a repetition, whose first reply was lost: a second hint does no harm.
        if imported.state.status in _AT_WORK:
            await self._dispatch.published(_hint(imported), imported.run.agent)
        return outcome == "created"

    async def _create(self, imported: ImportedRun) -> str:
        run, state = imported.run, imported.state
        header = flat({**header_of(run, handoff(state)), **imported.header})
        if since := log_end(state.window):
            header += ["since", since]
        log, outcomes = imported.log, imported.outcomes
        parts = [header, *map(flat, (log, outcomes, imported.lost))]
        # Other releases may pack the same records in another way.
        content = [header, *(flat(_plain(part)) for part in (log, outcomes)), parts[3]]
        digest = _digest(content)
        events = status_event(state, state.status, await self._connection.now())
        # Again where a staged page has expired, or another call for the same run took the pages.
        for _ in range(_TRIES):
            counts = [len(header), *await self._stage_all(run.run_id, digest, parts)]
            values = [part for part, count in zip(parts, counts, strict=True) if count > 0]
            (outcome,) = await self._publish(imported, digest, events, counts, values)
            if outcome != "missing":
                return str(outcome)
        msg = f"the log of the new run {run.run_id} does not stay in Redis; try again"
        raise StoreError(msg)

    async def _stage_all(
        self, run_id: str, digest: str, parts: Sequence[Sequence[Any]]
    ) -> list[int]:
        """Stage long parts; return the number of values of each part, of a staged one -fields."""
        counts = []
        for name, part in zip(_STAGED, parts[1:], strict=True):
            parted = list(pages(part))
            for page in parted if len(parted) > 1 else ():
                lifetime = STAGED_SECONDS * 1000
                await self._scripts.run("stage", run_id, digest, name, lifetime, *page)
            counts.append(-len(part) // 2 if len(parted) > 1 else len(part))
        return counts

    async def _publish(
        self,
        imported: ImportedRun,
        digest: str,
        events: Events,
        counts: list[int],
        values: list[list[Any]],
    ) -> Any:
        run, state = imported.run, imported.state
        return await self._pushing.run(
            "adopt",
            run.run_id,
            digest,
            state.status.value,
            imported.step,
            self._grace_ms,
            self._retention,
            self._dispatch.message(_hint(imported), run.agent),
            stored_events(events),
            len(events),
            *counts,
            *(value for part in values for value in part),
        )


def _hint(imported: ImportedRun) -> Work:
    return Work(imported.run.run_id, imported.step)


def pages(part: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield field, value, ... in pages that one script may write, each with one pair at least."""
    begin = size = 0
    for at in range(0, len(part), 2):
        own = len(part[at]) + len(part[at + 1])
        if at > begin and (size + own > PAGE_BYTES or at - begin >= 2 * PAGE_FIELDS):
            yield part[begin:at]
            begin, size = at, 0
        size += own
    if part:
        yield part[begin:]


def _plain(stored: Mapping[str, str]) -> dict[str, bytes]:
    return {name: unpacked(value) for name, value in stored.items()}


def _digest(parts: list[list[Any]]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for value in part:
            digest.update(value if isinstance(value, bytes) else str(value).encode())
            digest.update(b"\0")
    return digest.hexdigest()[:32]
