"""How many workers a fleet should have: the signal for autoscalers.

Work is what workers could do now, and within a minute: steps that limits admit, and what is in
hand. What waits for anything else is not, however long the queue is. `wanted` decides, purely.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import orjson
from pydantic import Field

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.limits.budgets import HOLD
from stepfleet.orchestrator.limits.limit import AT, EACH, kind_of
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.fleet.demand import (
    LIMITS,
    PAUSED,
    SOON_SECONDS,
    STARTS,
    FleetDemand,
    fleet_demand,
)
from stepfleet.orchestrator.store.fleet.overview import WorkerSeen, workers
from stepfleet.orchestrator.store.limits import LimitUse
from stepfleet.orchestrator.store.store import Store

SCHEMA = 1
KEPT_MS = 8_000
"""How long workers that show metrics share one reading."""
_SLACK = 1e-9


class StepGroup(Record):
    """Steps that need room under the same `limits`: so many now, and so many within a minute."""

    limits: tuple[str, ...] = ()
    queued: float = Field(default=0.0, ge=0)
    due_soon: float = Field(default=0.0, ge=0)


class ScaleDemand(Record):
    """What there is to do, and the `room` for further steps under each limit within a minute.

    A limit without a room has room for all.
    """

    in_hand: float = Field(default=0.0, ge=0)
    groups: tuple[StepGroup, ...] = ()
    room: dict[str, float] = Field(default_factory=dict)


class ScaleSignal(Record):
    """How many workers the queue should have (`wanted`), and why.

    `work` is `queued` (admissible steps, or calls of tools), `due_soon` (within a minute) and
    `in_hand`. `workers` live and take steps; they have `slots` together, a new one
    `slots_per_worker`. `waits` counts by cause what is not work. `estimated`: the fleet has more
    runs than were looked at.
    """

    queue: str
    work: int
    queued: int
    due_soon: int
    in_hand: int
    slots: int
    workers: int
    wanted: int
    slots_per_worker: int
    waits: dict[str, int] = Field(default_factory=dict)
    estimated: bool = False


# ------------------------------------------------------------------ decisions, pure


def wanted(demand: ScaleDemand, slots_per_worker: int) -> int:
    """Return how many workers should be there: 0 only where there is nothing to do.

    Never more than those steps need that limits admit.
    """
    return _whole(sum(work_of(demand)) / slots_per_worker)


def work_of(demand: ScaleDemand) -> tuple[float, float, float]:
    """Return what there is to do: admissible steps, those of the next minute, and in hand."""
    queued = admitted([(one.limits, one.queued) for one in demand.groups], demand.room)
    both = [(one.limits, one.queued + one.due_soon) for one in demand.groups]
    return queued, max(admitted(both, demand.room) - queued, 0.0), demand.in_hand


def admitted(steps: Iterable[tuple[Sequence[str], float]], room: Mapping[str, float]) -> float:
    """Return how many of these steps have room, each under the limits that are named with it.

    Limits of one kind (models, tenants, ...) are added up exactly. Where several kinds hold at
    once it is the least that one kind leaves: never less than there is room for, seldom more.
    """
    fitting = [
        (names, min(number, *(room.get(name, math.inf) for name in names), math.inf))
        for names, number in steps
    ]
    least = sum(number for _, number in fitting)
    for kind in {_kind(name) for name in room}:
        sums: defaultdict[str, float] = defaultdict(float)
        for names, number in fitting:
            of_kind = [name for name in names if _kind(name) == kind]
            sums[of_kind[0] if of_kind else ""] += number
        least = min(least, sum(min(one, room.get(name, math.inf)) for name, one in sums.items()))
    return least


def _kind(name: str) -> str:
    if name.startswith(STARTS):
        return STARTS + _kind(name.removeprefix(STARTS))
    if (kind := kind_of(name)) in EACH:
        return kind
    return "service" if name.endswith(":*") else AT if AT in name else "model"


def _whole(number: float) -> int:
    return math.ceil(number - _SLACK)


def room_of(use: LimitUse, tokens: Mapping[str, float]) -> dict[str, float]:
    """Return how many further steps a limit admits within a minute, and how many first ones.

    `tokens` has what a call under it takes on average, as far as that is known; no rate of tokens
    counts before.
    """
    limit = use.limit
    most = math.inf
    if limit is not None and limit.in_flight is not None:
        most = max(limit.in_flight - use.in_flight, 0)
    for budget in use.budgets:
        if budget.left <= 0 and (budget.reserved > 0 or (limit and limit.on_budget == HOLD)):
            most = 0
    minutes = max(SOON_SECONDS - use.cool_seconds, 0) / 60
    if not minutes:
        most = 0
    starts = math.inf
    for field, level in use.levels.items():
        rate = min(getattr(limit, field, None) or math.inf, use.learned.get(field, math.inf))
        left = max(level + rate * minutes, 0.0)
        if field == "starts_per_minute":
            starts = left
        elif field == "requests_per_minute":
            most = min(most, left)
        elif tokens.get(field):
            most = min(most, left / tokens[field])
    found = {use.name: most, STARTS + use.name: starts}
    return {name: math.floor(one) for name, one in found.items() if one < math.inf}


def slots_of(seen: Iterable[WorkerSeen], queue: str, default: int) -> tuple[int, int, int]:
    """Return the slots and the number of living workers of a queue, and the slots of one.

    A worker with a pool of processes is one; one that is stopping takes no new steps. Where none
    lives a worker has the `default`.
    """
    serving = [one for one in seen if one.alive and queue in (one.queues or (queue,))]
    taking = [one for one in serving if not one.stopping]
    nodes = {one.name.removesuffix(f":{one.process.rpartition(':')[2]}") for one in taking}
    slots = sum(one.slots for one in taking)
    return slots, len(nodes), max(round(slots / len(nodes)), 1) if nodes else default


# ------------------------------------------------------------------ what is read


async def scale_signal(
    store: Store,
    queue: str | None = None,
    *,
    slots_per_worker: int | None = None,
    beside: int = 0,
) -> ScaleSignal:
    """Return the signal of a queue: that of steps, or one of tools.

    Where nobody says how many slots a new worker has, it has as many as those that live. `beside`
    workers are there whatever is wanted: `wanted` is without them. Raises `StoreError`, and
    `ConfigurationError` for wrong arguments.
    """
    if queue == "":
        raise ConfigurationError("the queue is empty; name one, such as gpu, or leave it out")
    if slots_per_worker is not None and slots_per_worker < 1:
        raise ConfigurationError("slots per worker must be 1 or more")
    if beside < 0:
        raise ConfigurationError("beside must be 0 workers or more")
    demand, seen = await fleet_demand(store), await workers(store)
    of = queue or store.settings.queue
    found = _signal(store, demand, await _room(store, demand), seen, of, slots_per_worker)
    return found.model_copy(update={"wanted": max(found.wanted - beside, 0)})


async def recent_signals(store: Store) -> dict[str, ScaleSignal]:
    """Return the signals of all queues that workers serve or tools need, some seconds old at most.

    All who ask share one reading. Raises `StoreError`.
    """
    place = store.keys.of(keys.SCALE)
    text = await store.connection.execute("GET", place)
    stored = orjson.loads(text) if text else {}
    if stored.get("schema") != SCHEMA:
        demand, seen = await fleet_demand(store), await workers(store)
        room = await _room(store, demand)
        alive = [one for one in seen if one.alive]
        named = {name for one in alive for name in (*(one.queues or ()), *one.tool_queues)}
        queues = sorted({store.settings.queue, *named, *demand.calls, *demand.held_calls})
        found = [_signal(store, demand, room, seen, queue, None) for queue in queues]
        stored = {"schema": SCHEMA, "signals": [one.to_dict() for one in found]}
        await store.connection.execute("SET", place, orjson.dumps(stored).decode(), "PX", KEPT_MS)
    fields = ScaleSignal.model_fields  # a later version may have more
    known = ({name: one[name] for name in fields if name in one} for one in stored["signals"])
    return {one["queue"]: ScaleSignal.model_validate(one) for one in known}


async def _room(store: Store, demand: FleetDemand) -> dict[str, float]:
    groups = (*demand.ready, *demand.due, *demand.lined)
    names = sorted({name for some in groups for name in some if not name.startswith(STARTS)})
    if not names:
        return {}
    uses = await store.limits.uses(demand.known, names)
    tokens = await store.limits.tokens_per_call(names)
    return {name: one for use in uses for name, one in room_of(use, tokens[use.name]).items()}


def _signal(
    store: Store,
    found: FleetDemand,
    room: Mapping[str, float],
    seen: Sequence[WorkerSeen],
    queue: str,
    slots_per_worker: int | None,
) -> ScaleSignal:
    is_steps = queue == store.settings.queue
    demand = _of_steps(found, room) if is_steps else _of_tools(found, queue)
    waits = dict(found.waits) if is_steps else {PAUSED: found.kept_calls.get(queue, 0.0)}
    parts = work_of(demand)
    if is_steps:
        asked = sum(one.queued + one.due_soon for one in demand.groups)
        waits[LIMITS] = asked + _without_room(found, room) - sum(parts[:2])
    slots, living, each = slots_of(seen, queue, store.settings.slots)
    each = slots_per_worker or each
    queued, due_soon, in_hand = map(_whole, parts)
    return ScaleSignal(
        queue=queue,
        work=queued + due_soon + in_hand,
        queued=queued,
        due_soon=due_soon,
        in_hand=in_hand,
        slots=slots,
        workers=living,
        wanted=wanted(demand, each),
        slots_per_worker=each,
        waits={cause: round(many) for cause, many in sorted(waits.items()) if round(many)},
        estimated=found.estimated,
    )


def _of_steps(found: FleetDemand, room: Mapping[str, float]) -> ScaleDemand:
    """Return the demand of steps. Of those in a line, what there will be room for is due soon."""
    groups = tuple(
        StepGroup(
            limits=limits,
            queued=found.ready.get(limits, 0),
            due_soon=found.due.get(limits, 0)
            + (found.lined.get(limits, 0) if has_room(limits, room) else 0),
        )
        for limits in sorted({*found.ready, *found.due, *found.lined})
    )
    return ScaleDemand(in_hand=found.held, groups=groups, room=dict(room))


def has_room(limits: Iterable[str], room: Mapping[str, float]) -> bool:
    """Return whether the room is known of a step that waits in a line: something keeps it there."""
    return any(name in room for name in limits)


def _without_room(found: FleetDemand, room: Mapping[str, float]) -> float:
    return sum(many for limits, many in found.lined.items() if not has_room(limits, room))


def _of_tools(found: FleetDemand, queue: str) -> ScaleDemand:
    calls = StepGroup(queued=found.calls.get(queue, 0))
    return ScaleDemand(in_hand=found.held_calls.get(queue, 0), groups=(calls,))
