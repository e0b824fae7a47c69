"""The figures of a fleet that metrics show, the same for every worker that reads them."""

from datetime import UTC, datetime

import orjson
from pydantic import Field, ValidationError

from stepfleet.orchestrator.records.archive import ArchiveFigures
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.codec import WAIT, load_wait, milliseconds
from stepfleet.orchestrator.store.dispatch import run_in
from stepfleet.orchestrator.store.fleet.overview import troubles, waiting_messages, workers
from stepfleet.orchestrator.store.fleet.scale import KEPT_MS, recent_signals
from stepfleet.orchestrator.store.limits import LimitState
from stepfleet.orchestrator.store.store import Store

SCHEMA = 1
"""Of the stored reading; a later version may add fields."""


class FleetFigures(Record):
    """The fleet at one moment, in numbers; the same for every worker that reads them.

    `queue_length` and `oldest_waiting_seconds` (of the message that is next) are None where the
    broker does not tell. `overdue` counts runs whose lease, or whose time to begin, has passed;
    `oldest_overdue_seconds` is by how much at most. `active` runs are neither ended nor paused.
    `refuses` counts what keeps all workers from their work: a full Redis, its disk, the broker.
    `outages` counts the services of models that are out, `late_schedules` the schedules that
    are behind, or whose batch cannot be submitted; `limits` has what happens under each of
    the limits. `waiting_for_people` counts calls that wait for an approval or an answer,
    `oldest_waiting_for_people_seconds` is how long the first of them has waited. `work` is what
    workers could do now, and `capacity` the slots of those that take steps, by queue (see
    `ScaleSignal`); both are up to eight seconds old. `archive` is None where the fleet has none.
    """

    queue_length: int | None
    oldest_waiting_seconds: float | None
    overdue: int
    oldest_overdue_seconds: float
    active: int
    workers: int
    slots: int
    slots_in_use: int
    refuses: int
    outages: int
    late_schedules: int
    waiting_for_people: int
    oldest_waiting_for_people_seconds: float
    limits: tuple[LimitState, ...] = ()
    work: dict[str, int] = Field(default_factory=dict)
    capacity: dict[str, int] = Field(default_factory=dict)
    archive: ArchiveFigures | None = None


async def recent_figures(store: Store) -> FleetFigures:
    """Return the figures, some seconds old at most: all who ask share one reading.

    So that each of many workers does not read what all of them report. Raises `StoreError`.
    """
    place = store.keys.of(keys.FIGURES)
    text = await store.connection.execute("GET", place)
    stored = orjson.loads(text) if text else {}
    if stored.get("schema") == SCHEMA:
        fields = FleetFigures.model_fields
        known = {name: value for name, value in stored["figures"].items() if name in fields}
        try:
            return FleetFigures.model_validate(known)
        except ValidationError:
            pass  # of a version whose records of limits have further fields
    found = await fleet_figures(store)
    stored = {"schema": SCHEMA, "figures": found.to_dict()}
    await store.connection.execute("SET", place, orjson.dumps(stored).decode(), "PX", KEPT_MS)
    return found


async def fleet_figures(store: Store) -> FleetFigures:
    """Return the figures of this moment. Raises `StoreError`."""
    now = (await store.connection.read_clock()).timestamp() * 1000
    shards = [store.keys.due(shard) for shard in range(store.keys.shards)]
    run = store.connection.execute_all
    active = sum(await run(*(("ZCARD", key) for key in shards)))
    overdue = sum(await run(*(("ZCOUNT", key, "-inf", now) for key in shards)))
    firsts = await run(*(("ZRANGE", key, 0, 0, "WITHSCORES") for key in shards))
    lateness = [now - float(flat[1]) for flat in firsts if flat]
    timed = await store.schedules.all()
    moment = datetime.fromtimestamp(now / 1000, UTC)
    asks = await store.approvals.figures()
    alive = [one for one in await workers(store) if one.alive]
    signals = await recent_signals(store)
    return FleetFigures(
        queue_length=await waiting_messages(store),
        oldest_waiting_seconds=await _oldest_waiting(store, now),
        overdue=overdue,
        oldest_overdue_seconds=max(0.0, *lateness, 0.0) / 1000,
        active=active,
        workers=len(alive),
        slots=sum(one.slots for one in alive),
        slots_in_use=sum(one.held for one in alive),
        refuses=len(await troubles(store)),
        outages=len(await store.circuits.outages()),
        late_schedules=sum(1 for one in timed if one.trouble(moment)),
        waiting_for_people=asks.count,
        oldest_waiting_for_people_seconds=max(now - (asks.oldest or now), 0.0) / 1000,
        limits=await store.limits.states_of_all(),
        work={queue: one.work for queue, one in signals.items()},
        capacity={queue: one.slots for queue, one in signals.items()},
        archive=await known_archive(store),
    )


async def known_archive(store: Store) -> ArchiveFigures | None:
    """Return the figures of the archive; None for a fleet that has none. Raises `StoreError`.

    One trip of two short reads per shard, each time that a process reads the fleet's figures.
    """
    if store.settings.archive_url or await store.reads.archived.is_used():
        return await store.archiving.figures()
    return None


async def _oldest_waiting(store: Store, now: float) -> float | None:
    """Return for how many seconds the message at the head of the queue has waited."""
    if store.dispatch.queue_key is None:
        return None
    raw = await store.connection.execute("LINDEX", store.dispatch.queue_key, -1)
    run_id = run_in(raw) if raw else None
    if run_id is None:
        return None if raw else 0.0
    stored = await store.connection.execute("HMGET", store.keys.run(run_id), *WAIT)
    header = dict(zip(WAIT, stored, strict=True))
    wait = load_wait(header)
    until = milliseconds(wait.deadline) if wait and wait.deadline else 0
    since = max(int(header["updated"] or 0), until)
    return max(now - since, 0.0) / 1000 if since else None
