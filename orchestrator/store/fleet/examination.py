"""Reads a fleet and its servers, and judges what was read: `stepfleet doctor` and Flower's page."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.errors import AgentException, SerializationError, StoreError
from stepfleet.orchestrator.records.calls.answers import Ask
from stepfleet.orchestrator.records.schedule import ScheduleView
from stepfleet.orchestrator.redis_client.urls import is_sentinel
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.admission.limit_settings import LimitSettings
from stepfleet.orchestrator.store.batches.schedules import Schedules
from stepfleet.orchestrator.store.fleet import checks
from stepfleet.orchestrator.store.fleet.checks import Check, fail, good, warn
from stepfleet.orchestrator.store.fleet.overview import FleetOverview, overview
from stepfleet.orchestrator.store.fleet.people import ask_figures, oldest_asks
from stepfleet.orchestrator.store.fleet.redis_facts import is_redis, redis_facts, sentinel_facts
from stepfleet.orchestrator.store.opening.opening import OpenStore, celery_app

_BROKER_SECONDS = 5


@dataclass(frozen=True, slots=True)
class FleetRead:
    """The fleet at one moment, its agents and schedules, and what is wrong with its limits.

    `names` are those of all agents, `unread` says why some of them cannot be read;
    `asks` are the calls that have waited longest for people.
    """

    overview: FleetOverview
    names: tuple[str, ...]
    agents: tuple[AgentConfig, ...]
    unread: Mapping[str, str]
    problem: str
    schedules: Sequence[ScheduleView]
    asks: Sequence[Ask]
    asks_in_all: int
    now: datetime


async def read_fleet(store: OpenStore) -> FleetRead:
    """Return what is judged of a fleet. Raises `StoreError`."""
    named = await store.connection.execute("HGETALL", store.keys.of(keys.NAMES))
    announced, unread, problem = [], {}, ""
    for name in sorted(named):
        try:
            announced.append(await store.configs.load(named[name]))
        except SerializationError as error:
            unread[name] = str(error)
    try:
        await LimitSettings(store.connection, store.keys).read()
    except StoreError as error:
        problem = str(error)
    agents = tuple(announced)
    timed = Schedules(store.connection, store.keys)
    return FleetRead(
        overview=await overview(store),
        names=tuple(sorted(named)),
        agents=agents,
        unread=unread,
        problem=problem,
        schedules=await timed.all(),
        asks=await oldest_asks(store),
        asks_in_all=(await ask_figures(store)).count,
        now=await timed.now(),
    )


def fleet_checks(read: FleetRead, queue: str) -> Iterator[Check]:
    """Judge a fleet whose steps go through `queue`. Pure."""
    seen = read.overview
    alive = [worker.name for worker in seen.workers if worker.alive]
    yield checks.workers(alive, seen.active, seen.troubles)
    yield from checks.stopping(seen.workers)
    yield checks.versions(seen.workers)
    yield from checks.paused(is_paused=seen.paused)
    yield from checks.queues(seen.unserved, queue)
    yield from checks.outages([str(one) for one in seen.outages])
    yield from checks.limits(read.problem, seen.limited)
    yield from checks.schedules(read.schedules, read.now, served=bool(alive))
    yield from checks.people(read.asks, read.asks_in_all, read.now)
    yield checks.agents(read.names)
    for name, why in read.unread.items():
        yield warn(f"agent {name}", why, "restart its workers: they announce it anew")


def server_checks(settings: Settings) -> Iterator[Check]:
    """Judge the servers of a fleet; connects to them, and blocks. Raises as `redis_facts`."""
    facts = redis_facts(settings.store, prefix=settings.prefix)
    yield good("Redis", "answers, and takes the credentials")
    yield from checks.redis(facts.server)
    if facts.cluster:
        yield from checks.cluster(facts.cluster)
    if is_sentinel(settings.store):
        yield checks.sentinels(sentinel_facts(settings.store))
    yield checks.shards(facts, settings.shards)
    yield checks.quarantine(facts.quarantined, facts.refusals, settings.prefix)
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
            found = checks.quarantine(facts.quarantined, facts.refusals, settings.prefix)
            yield found.model_copy(update={"check": "broker's quarantine"})
