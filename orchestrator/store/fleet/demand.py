"""What the active runs need at this moment: a worker, room under limits, or somebody else.

Read from the index of active runs and their headers. Of a large fleet a bounded sample is read, by
the time at which runs need attention: those that could go on now have near times. A reading costs
Redis at most `MOST_LOOKED_AT` headers, however many runs there are; nothing is written.
"""

import math
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.limits.limit import EACH, Limit, kind_of, model_of, names_of
from stepfleet.orchestrator.models.services import limit_name
from stepfleet.orchestrator.protocol.waiting import StepWait, WaitReason
from stepfleet.orchestrator.records.calls.answers import Awaited, awaited_by
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.codec import WAIT, load_wait, milliseconds
from stepfleet.orchestrator.store.dispatch import run_in
from stepfleet.orchestrator.store.store import Store

SOON_SECONDS = 60.0
"""What is due within so long is work."""
MOST_LOOKED_AT = 2_000
HELD, READY, DUE = "held", "ready", "due"
LIMITS, CIRCUITS, PEOPLE, CHILDREN, TOOLS = "limits", "circuits", "people", "children", "tools"
PAUSED, DELAYS, RUNS, OTHERS = "paused", "delays", "runs", "others"
STARTS = "starts of "
"""Before the name of a limit: its room for first steps of runs."""
_DEFERRED = 10_000_000_000_000
"""Added to the time of a run that lies in a long queue (see rescue.lua), in ms."""
_DOUBLED = 128
"""A ready run that nobody takes is looked at again after so many `grace` at most."""
_SHARES = (0.6, 0.1, 0.2, 0.1)
"""Of those that are looked at: near times, times of runs that nobody takes, far ones, deferred."""
_LEAST, _TOGETHER, _MOST_CALLS, _PAGE = 4, 5, 50, 200
_OPEN = frozenset({Lifecycle.QUEUED, Lifecycle.IN_PROGRESS})
_FIELDS = (
    *("status", "token", "lease", "batch", "heard", "tenant", "agent", "config", "overrides"),
    *("billed", "ahead", "uncalled", *WAIT),
)


@dataclass(frozen=True, slots=True)
class CallLook:
    """A call that a run waits for: `queue` of its tool, or what it awaits instead.

    `is_held`: a worker makes it now; `needs_worker`: somebody is to start what it waits for, or to
    answer it at its time limit.
    """

    queue: str
    is_held: bool = False
    needs_worker: bool = False


@dataclass(slots=True)
class RunLook:
    """An active run that was looked at, and of how many it is a sample (`weight`).

    `is_kept`: the fleet or its batch is paused; `in_line`: it waits for room under limits;
    `is_granted`: it has that room.
    """

    run_id: str
    weight: float
    header: Mapping[str, str | None]
    wait: StepWait | None = None
    calls: tuple[CallLook, ...] = ()
    is_kept: bool = False
    in_line: bool = False
    is_granted: bool = False
    limits: tuple[str, ...] = ()

    @property
    def is_asking(self) -> bool:
        """Whether its owner has made no call yet, and may have to wait for one."""
        return bool(self.header["token"]) and self.header["uncalled"] == self.header["token"]


def _counter() -> defaultdict[Any, float]:
    return defaultdict(float)


@dataclass(slots=True)
class FleetDemand:
    """What was found: runs by what they need, and the calls of tools by queue.

    `ready`, `due` and `lined` count steps by the limits that they need room under, the last those
    that wait in a line for it; `calls` and `held_calls` calls of tools without and with a worker.
    `waits` counts what is left out, by cause. `estimated`: of more runs than were looked at.
    """

    active: int = 0
    held: float = 0.0
    ready: defaultdict[tuple[str, ...], float] = field(default_factory=_counter)
    due: defaultdict[tuple[str, ...], float] = field(default_factory=_counter)
    lined: defaultdict[tuple[str, ...], float] = field(default_factory=_counter)
    calls: defaultdict[str, float] = field(default_factory=_counter)
    held_calls: defaultdict[str, float] = field(default_factory=_counter)
    kept_calls: defaultdict[str, float] = field(default_factory=_counter)
    waits: defaultdict[str, float] = field(default_factory=_counter)
    known: dict[str, Limit] = field(default_factory=dict)
    estimated: bool = False


def need_of(look: RunLook, now: float) -> str:
    """Return what a run needs at `now` (ms): HELD, READY, DUE, or the cause of its wait."""
    header, wait = look.header, look.wait
    if header["token"] and float(header["lease"] or 0) > now:
        if not look.is_asking or look.is_granted:
            return HELD
        return LIMITS if look.in_line else READY
    if look.is_kept:
        return PAUSED
    return READY if wait is None or wait.over else _need_of_waiting(look, wait, now)


def _need_of_waiting(look: RunLook, wait: StepWait, now: float) -> str:
    if wait.reason is WaitReason.LIMIT:
        return LIMITS if look.in_line else READY
    if wait.reason is WaitReason.RUNS:
        return RUNS if float(look.header["ahead"] or 0) > 0 else READY
    left = milliseconds(wait.deadline) - now if wait.deadline else math.inf
    if left <= 0 or any(one.needs_worker for one in look.calls):
        return READY
    if left <= SOON_SECONDS * 1000:
        return DUE
    causes = {WaitReason.DELAY: DELAYS, WaitReason.SERVICE: CIRCUITS}
    return _awaits(look.calls) if look.calls else causes.get(wait.reason, OTHERS)


def _awaits(calls: Iterable[CallLook]) -> str:
    places = {awaited_by(one.queue) for one in calls}
    if None in places:
        return TOOLS
    return CHILDREN if places == {Awaited.RUN} else PEOPLE


async def fleet_demand(store: Store) -> FleetDemand:
    """Return what active runs need. Raises `StoreError`."""
    now = (await store.connection.read_clock()).timestamp() * 1000
    places, active = await _sample(store, now)
    looks = await _headers(store, places)
    found = FleetDemand(active=active, estimated=len(places) < active)
    if found.estimated and not any(need_of(one, now) in (HELD, READY) for one in looks):
        # What is rare among many may be missed: the queue itself shows whether there is any.
        looks += await _headers(store, dict.fromkeys(await _in_queue(store), 1.0))
    await _look_at_requests(store, looks)
    await _look_at_calls(store, looks, now)
    needy = [one for one in looks if need_of(one, now) in (READY, DUE)]
    await _look_at_limits(store, needy, found)
    for one in looks:
        _enter(found, one, need_of(one, now))
    paused = (("ZCARD", f"{store.keys.tag(n)}runs:paused") for n in range(store.keys.shards))
    found.waits[PAUSED] += sum(await store.connection.execute_all(*paused))
    return found


def _enter(found: FleetDemand, look: RunLook, need: str) -> None:
    if need == HELD:
        found.held += look.weight
    elif need in (READY, DUE):
        limits = () if look.is_granted else look.limits
        (found.ready if need == READY else found.due)[limits] += look.weight
    elif need == LIMITS:
        found.lined[look.limits] += look.weight
    else:
        found.waits[need] += look.weight
    for one in look.calls:
        if awaited_by(one.queue) is None:
            calls = found.kept_calls if look.is_kept else found.calls
            (found.held_calls if one.is_held else calls)[one.queue] += look.weight


# ------------------------------------------------------------------ what is looked at


async def _sample(store: Store, now: float) -> tuple[dict[str, float], int]:
    """Return runs to look at, each with the number that it stands for; and how many are active."""
    grace = store.settings.grace * 1000
    soon = now + max(SOON_SECONDS * 1000, grace)
    ends = (soon, max(soon, now + _DOUBLED * grace), _DEFERRED)
    dues = [store.keys.due(shard) for shard in range(store.keys.shards)]
    asks = [("ZCOUNT", due, "-inf", end) for due in dues for end in (*ends, "+inf")]
    counts = [int(one) for one in await store.connection.execute_all(*asks)]
    parts, active = len(ends) + 1, sum(counts[len(ends) :: len(ends) + 1])
    windows = []
    for n, due in enumerate(dues):
        first = 0
        for share, end in zip(_SHARES, counts[n * parts : (n + 1) * parts], strict=True):
            size = max(end - first, 0)
            quota = max(int(share * MOST_LOOKED_AT / len(dues)), _LEAST)
            most = size if active <= MOST_LOOKED_AT else quota
            windows.append((due, size, _windows(first, size, most)))
            first = max(end, first)
    reads = [("ZRANGE", due, *one) for due, _, some in windows for one in some]
    replies = iter(await store.connection.execute_all(*reads))
    found: dict[str, float] = {}
    for _, size, some in windows:
        runs = {run_id for _ in some for run_id in next(replies)} - found.keys()
        found |= dict.fromkeys(runs, size / len(runs) if runs else 0.0)
    if active <= MOST_LOOKED_AT:  # all of them, if they have moved meanwhile too
        found = dict.fromkeys(found, 1.0)
    return found, active if active > MOST_LOOKED_AT else len(found)


def _windows(first: int, size: int, most: int) -> list[tuple[int, int]]:
    """Return ranks, first and last, of `most` of the `size` members from `first` on: some apart."""
    if size <= most:
        return [(first, first + size - 1)] if size else []
    many = -(-most // _TOGETHER)
    stride = size / many
    room = max(stride - _TOGETHER, 0)
    starts = (first + int(n * stride + random.random() * room) for n in range(many))  # noqa: S311
    return [(start, start + _TOGETHER - 1) for start in starts]


async def _headers(store: Store, places: Mapping[str, float]) -> list[RunLook]:
    """Return the open ones of these runs. Others of the event loop have turns meanwhile."""
    looks, ids = [], list(places)
    for some in (ids[at : at + _PAGE] for at in range(0, len(ids), _PAGE)):
        reads = (("HMGET", store.keys.run(run_id), *_FIELDS) for run_id in some)
        found = await store.connection.execute_all(*reads)
        for run_id, values in zip(some, found, strict=True):
            header = dict(zip(_FIELDS, values, strict=True))
            if header["status"] not in _OPEN:
                continue
            wait = None if header["token"] else load_wait(header)
            calls = wait.calls if wait and not wait.over else ()
            known = tuple(CallLook(one.queue) for one in calls[:_MOST_CALLS])
            looks.append(RunLook(run_id, places[run_id], header, wait, known))
    return looks


async def _in_queue(store: Store) -> list[str]:
    """Return some runs whose messages wait in the queue of steps, at both of its ends."""
    if (queue := store.dispatch.queue_key) is None:
        return []
    ends = (("LRANGE", queue, *at) for at in ((0, _MOST_CALLS), (-_MOST_CALLS, -1)))
    found = [one for some in await store.connection.execute_all(*ends) for one in some]
    runs = (run_in(one) for one in found)
    return list(dict.fromkeys(run_id for run_id in runs if run_id))


async def _look_at_requests(store: Store, looks: Sequence[RunLook]) -> None:
    """Note whose fleet or batch is paused: not all runs need to have learned of that."""
    batches: dict[int, dict[str, None]] = defaultdict(dict)
    for one in looks:
        if batch := one.header["batch"]:
            batches[store.keys.shard_of(one.run_id)][f"b:{batch}"] = None
    reads = (("HMGET", store.keys.flags(shard), *some) for shard, some in batches.items())
    fleet = ("HEXISTS", store.keys.flags(0), "fleet")
    is_paused, *flags = await store.connection.execute_all(fleet, *reads)
    known = {
        (shard, name): flag
        for (shard, some), values in zip(batches.items(), flags, strict=True)
        for name, flag in zip(some, values, strict=True)
    }
    for one in looks:
        flag = known.get((store.keys.shard_of(one.run_id), f"b:{one.header['batch']}"))
        word, _, number = (flag or "").partition(" ")
        one.is_kept = bool(is_paused) or (word == "pause" and number != one.header["heard"])


async def _look_at_calls(store: Store, looks: Sequence[RunLook], now: float) -> None:
    """Note which calls have a worker, and which need one to begin or to end their wait."""
    waiting = [(one, one.wait.calls[:_MOST_CALLS]) for one in looks if one.calls and one.wait]
    reads = []
    for one, calls in waiting:
        names = [f"{kind}:{call.index}" for call in calls for kind in "oltk"]
        reads.append(("HMGET", f"{store.keys.run(one.run_id)}:journal", *names))
    found = [list(zip(*[iter(one)] * 4, strict=True)) for one in await _all(store, reads)]
    keys_of_runs = [
        key
        for (_, calls), values in zip(waiting, found, strict=True)
        for call, (*_, key) in zip(calls, values, strict=True)
        if call.queue == Awaited.RUN and key
    ]
    states = await _all(store, [("EXISTS", store.keys.run(key)) for key in keys_of_runs])
    begun = {key for key, is_there in zip(keys_of_runs, states, strict=True) if is_there}
    for (one, _), values in zip(waiting, found, strict=True):
        states_of = zip(one.calls, values, strict=True)
        one.calls = tuple(
            _call(call, owner, lease, till, key, begun, now)
            for call, (owner, lease, till, key) in states_of
        )


def _call(
    call: CallLook,
    owner: str | None,
    lease: str | None,
    till: str | None,
    key: str | None,
    begun: Collection[str],
    now: float,
) -> CallLook:
    by, is_held = awaited_by(call.queue), bool(owner) and float(lease or 0) > now
    is_late = bool(till) and float(till or 0) <= now
    needs = by is not None and (is_late or (by is Awaited.RUN and key not in begun))
    return CallLook(call.queue, is_held=is_held, needs_worker=needs)


async def _all(store: Store, reads: Sequence[tuple[object, ...]]) -> list[list[str | None]]:
    return await store.connection.execute_all(*reads)


# ------------------------------------------------------------------ limits


async def _look_at_limits(store: Store, looks: Sequence[RunLook], found: FleetDemand) -> None:
    """Note who waits in a line, who has room already, and under which limits the others need it."""
    if not looks or not await store.connection.execute(
        "EXISTS", store.keys.of(keys.LIMIT_SETTINGS)
    ):
        return
    ids = [one.run_id for one in looks]
    hashes = map(store.keys.of, (keys.LIMIT_WAITING, keys.LIMIT_GRANTS))
    reads = (("HMGET", key, *ids) for key in hashes)
    whose = [await _whose(store, one) for one in looks]
    names = sorted({name for one in whose for name in _names(**one)})
    found.known = await store.limits.under(names)
    for one, of, place, grant in zip(
        looks, whose, *await store.connection.execute_all(*reads), strict=True
    ):
        one.in_line, one.is_granted = bool(place), bool(grant)
        one.limits = names_of(found.known, **of)
        if one.header["status"] == Lifecycle.QUEUED:
            one.limits += tuple(STARTS + name for name in one.limits)


async def _whose(store: Store, look: RunLook) -> dict[str, str]:
    """Return whose calls the run's are; of an unreadable configuration no model is known."""
    header = {name: value or "" for name, value in look.header.items()}
    model = ""
    try:
        config = await store.configs.of_run(header)  # cached: as many as there are agents
        model = limit_name(config.model, config.settings)
    except SerializationError:
        pass  # a worker will say so
    batch = header["batch"] or header["billed"]
    return {"model": model, "tenant": header["tenant"], "batch": batch, "agent": header["agent"]}


def _names(model: str, tenant: str, batch: str, agent: str) -> set[str]:
    """Return the names that limits of such calls may have."""
    own = {f"{kind}:{of}" for kind, of in zip(EACH, (tenant, batch, agent), strict=False) if of}
    found = {*own, *(f"{kind}:*" for kind in EACH[:3])}
    return found | ({model, model_of(model), f"{kind_of(model)}:*"} if model else set())
