"""Reads the figures of the whole fleet that metrics show: a few dozen small commands."""

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime

import orjson

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.store.admission.lines import LimitLines, LimitState
from stepfleet.orchestrator.store.batches.schedules import Schedules
from stepfleet.orchestrator.store.fleet.overview import troubles, waiting_messages, workers
from stepfleet.orchestrator.store.fleet.people import ask_figures
from stepfleet.orchestrator.store.model_calls.circuits import Circuits
from stepfleet.orchestrator.store.opening.opening import OpenStore


class FleetFigures(Record):
    """The fleet at one moment, in numbers; the same for every worker that reads them.

    `queue_length` and `oldest_waiting_seconds` (of the message that is next) are None where the
    broker does not tell. `overdue` counts runs whose lease, or whose time to begin, has passed;
    `oldest_overdue_seconds` is by how much at most. `active` runs are neither ended nor paused.
    `refuses` counts what keeps all workers from their work: a full Redis, its disk, the broker.
    `outages` counts the services of models that are out, `late_schedules` the schedules that
    are behind, or whose batch cannot be submitted; `limits` has what happens under each of
    the limits. `waiting_for_people` counts calls that wait for an approval or an answer,
    `oldest_waiting_for_people_seconds` is how long the first of them has waited.
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


async def fleet_figures(store: OpenStore) -> FleetFigures:
    """Return the figures of this moment. Raises `StoreError`."""
    now = (await store.connection.read_clock()).timestamp() * 1000
    shards = [store.keys.due(shard) for shard in range(store.keys.shards)]
    run = store.connection.execute_all
    active = sum(await run(*(("ZCARD", key) for key in shards)))
    overdue = sum(await run(*(("ZCOUNT", key, "-inf", now) for key in shards)))
    firsts = await run(*(("ZRANGE", key, 0, 0, "WITHSCORES") for key in shards))
    lateness = [now - float(flat[1]) for flat in firsts if flat]
    timed = await Schedules(store.connection, store.keys).all()
    moment = datetime.fromtimestamp(now / 1000, UTC)
    asks = await ask_figures(store)
    alive = [one for one in await workers(store) if one.alive]
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
        outages=len(await Circuits(store.connection, store.keys).outages()),
        late_schedules=sum(1 for one in timed if one.trouble(moment)),
        waiting_for_people=asks.count,
        oldest_waiting_for_people_seconds=max(now - (asks.oldest or now), 0.0) / 1000,
        limits=await LimitLines(store.connection, store.keys).configured(),
    )


async def _oldest_waiting(store: OpenStore, now: float) -> float | None:
    """Return for how many seconds the message at the head of the queue has waited."""
    if store.dispatch.queue_key is None:
        return None
    raw = await store.connection.execute("LINDEX", store.dispatch.queue_key, -1)
    run_id = _run_of(raw) if raw else None
    if run_id is None:
        return None if raw else 0.0
    fields = ("updated", "not_before")
    times = await store.connection.execute("HMGET", store.keys.run(run_id), *fields)
    since = max(float(one or 0) for one in times)
    return max(now - since, 0.0) / 1000 if since else None


def _run_of(raw: str) -> str | None:
    """Return the run of a task message; None for a message that is none of ours."""
    try:
        message: Mapping[str, str] = orjson.loads(raw)
        run_id = orjson.loads(base64.b64decode(message["body"]))[0][0]
    except (orjson.JSONDecodeError, binascii.Error, LookupError, TypeError, ValueError):
        return None
    return run_id if isinstance(run_id, str) else None
