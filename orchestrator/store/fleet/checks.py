"""The checks of a fleet and its servers: each judges one fact, and names the fix.

`stepfleet doctor` and the page of the fleet show the same ones.
"""

import asyncio
import secrets
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.archive.places import ArchivePlace, shown_url
from stepfleet.orchestrator.errors import (
    AgentException,
    ArchiveError,
    ConfigurationError,
    SerializationError,
    StoreError,
)
from stepfleet.orchestrator.records.archive import ArchiveFigures
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.answers import Ask
from stepfleet.orchestrator.records.schedule import ScheduleView
from stepfleet.orchestrator.redis_client.urls import is_sentinel
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.dispatch import celery_app
from stepfleet.orchestrator.store.fleet.figures import known_archive
from stepfleet.orchestrator.store.fleet.overview import (
    FleetOverview,
    KeeperSeen,
    WorkerSeen,
    overview,
)
from stepfleet.orchestrator.store.fleet.servers import (
    ClusterFacts,
    RedisFacts,
    SentinelFacts,
    ServerFacts,
    health_findings,
    is_redis,
    redis_facts,
    sentinel_facts,
)
from stepfleet.orchestrator.store.limits import (
    RAISE,
    LimitState,
    raised_by,
)
from stepfleet.orchestrator.store.store import Store
from stepfleet.orchestrator.version import Build, own_build

ENOUGH_SENTINELS = 3
REASONS = 3
"""Reasons of refused messages that are listed."""
LATE_SECONDS = 2 * 3600.0
"""For how long runs are due for the archive until that is worth a word: a few wait an hour."""
LONG_FAILURE = 3600.0
"""For how long an archive fails until that is a fault."""
PLACE_SECONDS = 15.0
"""How long the storage of an archive may take to write, read and remove a small file."""
LONG_PAUSE = 60.0
"""Seconds for which a model refuses calls until that is worth a word."""
NOBODY = "no worker is alive"
_BROKER_SECONDS = 5


class State(StrEnum):
    """The outcome of a check; only `FAIL` makes `doctor` fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(Record):
    """One finding about the subject `check`. `fix` is empty where nothing needs to be done."""

    check: str
    state: State
    found: str
    fix: str = ""


def good(about: str, found: str) -> Check:
    """Return a passed check."""
    return Check(check=about, state=State.OK, found=found)


def warn(about: str, found: str, fix: str) -> Check:
    """Return a warning."""
    return Check(check=about, state=State.WARN, found=found, fix=fix)


def fail(about: str, found: str, fix: str) -> Check:
    """Return a failed check."""
    return Check(check=about, state=State.FAIL, found=found, fix=fix)


def redis(facts: ServerFacts) -> list[Check]:
    """Judge the store's server."""
    worried = {one.about: one for one in health_findings(facts)}
    sound = {
        "version": f"version {facts.version or 'unknown'}",
        "durability": "append-only file is on" if facts.append_only else "does not say",
        "eviction": facts.eviction or "does not say",
        "memory": "does not say" if facts.full is None else "has room",
        "disk": "does not say" if facts.writes is None else "takes data",
    }
    return [
        fail(f"Redis {about}", worried[about].found, worried[about].fix)
        if about in worried
        else good(f"Redis {about}", text)
        for about, text in sound.items()
    ]


def cluster(facts: ClusterFacts) -> list[Check]:
    """Judge a cluster: whether it serves all slots, and survives the death of a master."""
    nodes = f"{facts.masters} masters, {facts.replicas} replicas"
    spread = ", ".join(map(str, sorted(facts.shards, reverse=True)))
    found = [good("cluster", nodes), good("cluster's shards", f"on the masters: {spread}")]
    if not facts.sound or facts.unserved:
        fix = "bring its masters back, or promote their replicas (redis-cli --cluster check)"
        lacks = f"{facts.unserved} slots are not served" if facts.unserved else "it is down"
        found[0] = fail("cluster", f"{nodes}; {lacks}", fix)
    elif facts.alone:
        fix = "give each master a replica (redis-cli --cluster add-node ... --cluster-slave)"
        lacks = f"no replica has {', '.join(facts.alone)}: while it is down its runs wait"
        found[0] = warn("cluster", f"{nodes}; {lacks}", fix)
    if 0 in facts.shards:
        fix = "a store with more shards (STEPFLEET_SHARDS=256 before its first use) spreads better"
        found[1] = warn("cluster's shards", f"on the masters: {spread}", fix)
    if facts.moving:
        what = f"{facts.moving} slots are migrating: runs in them wait until that is done"
        fix = "wait; if it is stuck: redis-cli --cluster fix HOST:PORT"
        found.append(warn("cluster's slots", what, fix))
    return found


def sentinels(facts: SentinelFacts) -> Check:
    """Judge whether a failover can happen."""
    found = f"{facts.answering} of {facts.named} answer, {facts.replicas} replicas"
    if facts.answering < facts.named:
        fix = "start them, or take them out of STEPFLEET_REDIS_URL"
        return warn("Sentinels", found, fix)
    if facts.known < ENOUGH_SENTINELS or facts.quorum > facts.known:
        what = f"{found}; {facts.known} watch the master, {facts.quorum} must agree"
        fix = "run three or more on different machines, with a quorum of a majority"
        return warn("Sentinels", what, fix)
    if not facts.replicas:
        fix = "start a replica: without one there is nothing to fail over to"
        return warn("Sentinels", found, fix)
    return good("Sentinels", found)


def shards(facts: RedisFacts, wanted: int) -> Check:
    """Judge whether settings and store have the same number of shards."""
    if facts.shards in (None, wanted):
        return good("shards", f"{wanted}" + ("" if facts.shards else " (the store is unused)"))
    return fail(
        "shards",
        f"the store has {facts.shards}, the settings say {wanted}",
        f"set STEPFLEET_SHARDS={facts.shards}",
    )


def quarantine(count: int, reasons: Mapping[str, int] | None = None, prefix: str = "") -> Check:
    """Judge broker messages that were refused; `reasons` counts them by reason."""
    if not count:
        return good("quarantine", "empty")
    causes = [f"{why} ({often}x)" for why, often in (reasons or {}).items()]
    shown = "; ".join([*causes[:REASONS], *(["and others"] if len(causes) > REASONS else [])])
    return warn(
        "quarantine",
        f"{count} broker messages were refused and put aside" + (f": {shown}" if shown else ""),
        "find out who else writes to the queue, and whether all have the same signing keys; "
        f"redis-cli DEL {prefix}sf:quarantine drops them",
    )


def outages(found: Sequence[str]) -> Iterator[Check]:
    """Judge the services of models: those that are out for the whole fleet."""
    for text in found:
        fix = (
            "start it, or wait: it is probed every minute; docs/providers.md#services-that-are-out"
        )
        yield warn("model service", text, fix)


def limits(problem: str, found: Sequence[LimitState]) -> Iterator[Check]:
    """Judge the limits for which runs wait: that is what they are for, but for a long pause.

    `problem` is why they cannot be read, if they cannot.
    """
    if problem:
        yield fail("limits", problem, "until then its runs wait: stepfleet limits set, or clear")
    for one in found:
        if one.cool_seconds > LONG_PAUSE:
            fix = (
                "the provider has asked for this pause: look at the account's quota there; "
                f"stepfleet limits clear {shlex.quote(one.name)} ends it"
            )
            yield warn("limits", str(one), fix)
        elif raise_it := raised_by(one.waits_for):
            fix = f"raise it: {raise_it.removeprefix(RAISE)}"
            yield warn("limits", str(one).removesuffix(raise_it), fix)
        else:
            yield good("limits", str(one))


def workers(
    names: Sequence[str], waiting: int, troubles: Sequence[str] = (), *, kept: bool = False
) -> Check:
    """Judge whether workers are running; they cannot report while a server has `troubles`.

    `kept`: a keeper looks after the fleet, so that it may have no workers while nothing waits.
    """
    if names:
        return good("workers", f"{len(names)} alive: {_some(names)}")
    if troubles:
        return warn("workers", f"unknown: {'; '.join(troubles)}", "see above")
    found = f"none alive{f', and {_runs_wait(waiting)}' if waiting else ''}"
    fix = "start one: stepfleet worker --agents MODULE (or stepfleet up)"
    if kept and not waiting:
        return good("workers", f"{found}; a keeper looks after the fleet")
    if kept:
        return warn("workers", f"{found}; a keeper looks after the fleet", fix)
    if waiting:
        found += "; nobody looks after timers, schedules and events: no keeper is alive either"
    return (fail if waiting else warn)("workers", found, fix)


def keepers(seen: Iterable[KeeperSeen]) -> Iterator[Check]:
    """Tell which keepers are alive, if any, with their versions."""
    if alive := [f"{one.name} ({_running(one)})" for one in seen if one.alive]:
        yield good("keepers", f"{len(alive)} alive: {_some(alive)}")


def versions(seen: Sequence[KeeperSeen]) -> Check:
    """Judge whether living workers, and keepers, have the same build; earlier ones report none."""
    found: dict[str, list[str]] = {}
    for one in seen:
        if one.alive:
            found.setdefault(_running(one), []).append(one.name)
    shown = "; ".join(f"{build}: {_some(names)}" for build, names in sorted(found.items()))
    builds = {one.build for one in seen if one.alive}
    if len(builds) <= 1:
        return good("worker versions", shown if len(found) > 1 else ", ".join(found) or NOBODY)
    fix = "finish the rolling upgrade: docs/operations.md#rolling-upgrades"
    return warn("worker versions", f"a mixed fleet: {shown}", fix)


def _running(one: KeeperSeen) -> str:
    build = str(one.build) or "an older one"
    return f"{build} ({one.release})" if one.release else build


def client_version(seen: Iterable[WorkerSeen], here: Build) -> Iterator[Check]:
    """Judge whether what asks, at `here`, has the build of some living worker."""
    builds = {one.build for one in seen if one.alive}
    if not builds or any(here.version == one.version and _may_be(here, one) for one in builds):
        return
    there = ", ".join(sorted(str(one) or "an older one" for one in builds))
    fix = (
        "upgrade what is behind: workers first, then clients, Flower and keepers "
        "(docs/operations.md#rolling-upgrades)"
    )
    yield warn("client version", f"{str(here) or 'an unknown one'} here, workers have {there}", fix)


def _may_be(here: Build, there: Build) -> bool:
    return here.commit == there.commit or not here.commit


def stopping(seen: Iterable[WorkerSeen]) -> Iterator[Check]:
    """Judge workers that take no new steps, where there is no other one."""
    alive = [one for one in seen if one.alive]
    if alive and all(one.stopping for one in alive):
        found = f"all that are alive are stopping: {_some([one.name for one in alive])}"
        yield warn("workers", found, "start one: stepfleet worker --agents MODULE")


def paused(*, is_paused: bool) -> Iterator[Check]:
    """Judge whether the whole fleet is paused."""
    if is_paused:
        yield warn("fleet", "it is paused: no step begins", "stepfleet resume --all")


def schedules(
    views: Sequence[ScheduleView], now: datetime, *, served: bool = True
) -> Iterator[Check]:
    """Judge schedules: those that are behind, whose batch cannot be submitted, or that rest.

    `served`: a worker or a keeper is alive.
    """
    troubled = [one for one in views if one.trouble(now, served=served)]
    for one in troubled:
        name = one.schedule.name
        fix = f"look: stepfleet schedule show {name}; to leave its missed ticks out: pause, resume"
        if one.is_unserved(now, served=served):
            missed = one.schedule.missed
            fix = f"start one: stepfleet worker --agents MODULE (ticks it makes up: {missed})"
        yield warn(f"schedule {name}", one.trouble(now, served=served), fix)
    if views and not troubled:
        yield good("schedules", f"{len(views)} on time or paused")


def approvals(asks: Sequence[Ask], count: int, now: datetime) -> Iterator[Check]:
    """Judge the calls that wait for people, by those that have waited longest; all are `count`.

    A warning: a time limit that decides itself is near, or over.
    """
    if not asks:
        return
    waits = f"{count} {'call waits' if count == 1 else 'calls wait'} for people"
    found = f"{waits}, the first since {asks[0].since:%Y-%m-%d %H:%M} UTC"
    near = [
        one.until for one in asks if one.until and one.until - now < (one.until - one.since) / 10
    ]
    if not near:
        yield good("approvals", found)
        return
    soon = f"the time of {len(near)} is nearly over, or over (until {min(near):%Y-%m-%d %H:%M} UTC)"
    yield warn("approvals", f"{found}; {soon}", "decide them: stepfleet approvals")


def archive(figures: ArchiveFigures | None) -> Iterator[Check]:
    """Judge the archive of a fleet that has one: whether runs go there, and in time."""
    if figures is None:
        return
    there = f"runs moved: {figures.runs:,}, files: {figures.files:,}"
    where = figures.url or "not named here: STEPFLEET_ARCHIVE_URL is for those that move runs"
    if figures.error and figures.failing_since:
        found = f"fails since {figures.failing_since:%Y-%m-%d %H:%M} UTC: {figures.error}"
        fix = "ended runs stay in Redis until it works: docs/how-to/archive.md#when-it-fails"
        yield (fail if figures.failing_seconds > LONG_FAILURE else warn)("archive", found, fix)
    elif figures.overdue_seconds > LATE_SECONDS:
        waits = f"due: {figures.due_runs:,} runs, {figures.due_batches:,} batches"
        found = f"{waits}; the first for {figures.overdue_seconds / 3600:.0f} h ({where})"
        fix = "keepers or workers with STEPFLEET_ARCHIVE_URL move them; now: stepfleet archive"
        yield warn("archive", found, fix)
    else:
        yield good("archive", f"{there} ({where})")


async def archive_place(settings: Settings) -> Check:
    """Judge whether files can be written to the archive, read and removed: does so with one."""
    url = settings.archive_url.get_secret_value() if settings.archive_url else ""
    name, data = f"check-{secrets.token_hex(8)}", b"stepfleet doctor"
    try:
        place = ArchivePlace.open(url)
        async with asyncio.timeout(PLACE_SECONDS):
            await place.write(name, data)
            same = await place.read(name) == data
            await place.remove(name)
    except ConfigurationError as error:
        return fail("archive's place", error.message, "see the message")
    except ArchiveError as error:
        fix = "correct STEPFLEET_ARCHIVE_URL, or the storage's own variables and permissions"
        return fail("archive's place", error.message, fix)
    except TimeoutError:
        found = f"{shown_url(url)} has not answered within {PLACE_SECONDS:g} s"
        return fail("archive's place", found, "look at the storage, and the network to it")
    if not same:
        return fail("archive's place", f"{place.url} gives other bytes back", "use another storage")
    return good("archive's place", f"{place.url} takes, gives and removes files")


def serving(queue: str, steps: str | None = None) -> str:
    """Return the command that starts a worker for a queue of tools, or for the queue `steps`."""
    named = "" if queue == steps else f" --queue {shlex.quote(queue)}"
    return f"stepfleet worker --agents MODULE{named}"


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + more


def queues(unserved: Mapping[str, int], steps: str) -> list[Check]:
    """Judge queues that no worker serves: `steps` is for steps, the others are for tools."""
    return [
        (fail if waiting else warn)(
            f"queue {queue}",
            f"no running worker serves it: {_waits(queue, waiting, steps)}",
            f"start one: {serving(queue, steps)}",
        )
        for queue, waiting in unserved.items()
    ]


def _waits(queue: str, waiting: int, steps: str) -> str:
    runs = _runs_wait(waiting)
    if queue == steps:
        return f"{runs} for a step" if waiting else "steps would wait"
    return f"{runs} for a tool there" if waiting else "calls of the tools there would wait"


def _runs_wait(count: int) -> str:
    return "1 run waits" if count == 1 else f"{count} runs wait"


def agents(names: Sequence[str]) -> Check:
    """Judge whether runs can be submitted by an agent's name."""
    if names:
        return good("agents", ", ".join(sorted(names)))
    return warn(
        "agents",
        "none known",
        "start a worker with --agents MODULE, or pass --agents to submit",
    )


@dataclass(frozen=True, slots=True)
class FleetRead:
    """The fleet at one moment, its agents and schedules, and what is wrong with its limits.

    `names` are those of all agents, `unread` says why some of them cannot be read;
    `asks` are the calls that have waited longest for people; `archive` is None where there is none;
    `here` is the build that reads.
    """

    overview: FleetOverview
    names: tuple[str, ...]
    agents: tuple[AgentConfig, ...]
    unread: Mapping[str, str]
    problem: str
    schedules: Sequence[ScheduleView]
    asks: Sequence[Ask]
    asks_in_all: int
    archive: ArchiveFigures | None
    now: datetime
    here: Build


async def read_fleet(store: Store) -> FleetRead:
    """Return the facts of a fleet that are judged. Raises `StoreError`."""
    named = await store.connection.execute("HGETALL", store.keys.of(keys.NAMES))
    announced, unread, problem = [], {}, ""
    for name in sorted(named):
        try:
            announced.append(await store.configs.load(named[name]))
        except SerializationError as error:
            unread[name] = str(error)
    try:
        await store.limits.read()
    except StoreError as error:
        problem = str(error)
    agents = tuple(announced)
    timed = store.schedules
    return FleetRead(
        overview=await overview(store),
        names=tuple(sorted(named)),
        agents=agents,
        unread=unread,
        problem=problem,
        schedules=await timed.all(),
        asks=await store.approvals.oldest(),
        asks_in_all=(await store.approvals.figures()).count,
        archive=await known_archive(store),
        now=await timed.now(),
        here=own_build(),
    )


def fleet_checks(read: FleetRead, queue: str) -> Iterator[Check]:
    """Judge a fleet whose steps go through `queue`. Pure."""
    seen = read.overview
    alive = [worker.name for worker in seen.workers if worker.alive]
    kept = any(one.alive for one in seen.keepers)
    yield workers(alive, seen.active, seen.troubles, kept=kept)
    yield from keepers(seen.keepers)
    yield from stopping(seen.workers)
    yield versions((*seen.workers, *seen.keepers))
    yield from client_version(seen.workers, read.here)
    yield from paused(is_paused=seen.paused)
    yield from queues(seen.unserved, queue)
    yield from outages([str(one) for one in seen.outages])
    yield from limits(read.problem, seen.limited)
    yield from schedules(read.schedules, read.now, served=bool(alive) or kept)
    yield from approvals(read.asks, read.asks_in_all, read.now)
    yield from archive(read.archive)
    yield agents(read.names)
    for name, why in read.unread.items():
        yield warn(f"agent {name}", why, "restart its workers: they announce it anew")


def server_checks(settings: Settings) -> Iterator[Check]:
    """Judge the servers of a fleet; connects to them, and blocks. Raises as `redis_facts`."""
    facts = redis_facts(settings.store, prefix=settings.prefix)
    yield good("Redis", "answers, and takes the credentials")
    yield from redis(facts.server)
    if facts.cluster:
        yield from cluster(facts.cluster)
    if is_sentinel(settings.store):
        yield sentinels(sentinel_facts(settings.store))
    yield shards(facts, settings.shards)
    yield quarantine(facts.quarantined, facts.refusals, settings.prefix)
    if settings.broker != settings.store:
        yield _broker(settings)
        yield from _broker_quarantine(settings)


def _broker(settings: Settings) -> Check:
    app = celery_app(settings)
    try:
        with app.connection_for_write() as connection:
            shown = connection.as_uri()
            once = {"max_retries": 1, "interval_start": 0, "timeout": _BROKER_SECONDS}
            connection.ensure_connection(**once)
    except Exception as error:  # noqa: BLE001 - every transport has exceptions of its own
        fix = "start it, or correct STEPFLEET_BROKER_URL"
        return fail("broker", f"cannot be reached: {error}", fix)
    finally:
        app.close()
    return good("broker", f"{shown} answers")


def _broker_quarantine(settings: Settings) -> Iterator[Check]:
    """Judge a broker's own quarantine, where it is a Redis that answers."""
    with suppress(AgentException):
        if is_redis(settings.broker):
            facts = redis_facts(settings.broker, prefix=settings.prefix)
            found = quarantine(facts.quarantined, facts.refusals, settings.prefix)
            yield found.model_copy(update={"check": "broker's quarantine"})
