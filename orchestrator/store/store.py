"""The store: opened from the settings, with all its gateways. The one place that makes clients."""

import asyncio
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from celery import Celery
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import Connection as PlainConnection
from redis.asyncio.connection import SSLConnection

from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.redis_client.cluster import Cluster
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.redis_client.node import RenewablePool, pack_faster
from stepfleet.orchestrator.redis_client.sentinel import master_pool
from stepfleet.orchestrator.redis_client.urls import (
    NodeAddress,
    is_cluster,
    is_sentinel,
    parse_cluster,
    parse_sentinel,
)
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.admission import AdmissionCalls
from stepfleet.orchestrator.store.audit import Audit
from stepfleet.orchestrator.store.batches.batches import Batches
from stepfleet.orchestrator.store.batches.requests import BatchRequests
from stepfleet.orchestrator.store.batches.schedules import Schedules
from stepfleet.orchestrator.store.batches.upkeep import BatchUpkeep, FollowUpIndex
from stepfleet.orchestrator.store.circuits import Circuits
from stepfleet.orchestrator.store.configs import Configs
from stepfleet.orchestrator.store.dispatch import SILENCE_SECONDS, Dispatch, client_app
from stepfleet.orchestrator.store.feeds import Chunks, Feeds
from stepfleet.orchestrator.store.gateway import Opened
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.ledger import Ledger
from stepfleet.orchestrator.store.limits import LimitStore
from stepfleet.orchestrator.store.response_cache import CacheEntries
from stepfleet.orchestrator.store.runs.approvals import ApprovalStore
from stepfleet.orchestrator.store.runs.archive_files import ArchiveFiles
from stepfleet.orchestrator.store.runs.archiving import Archiving
from stepfleet.orchestrator.store.runs.control import Control, Purging
from stepfleet.orchestrator.store.runs.links import Dependents, Links
from stepfleet.orchestrator.store.runs.listing import RunLists
from stepfleet.orchestrator.store.runs.reading import RunReader
from stepfleet.orchestrator.store.runs.results import RunResults
from stepfleet.orchestrator.store.runs.returning import Returning
from stepfleet.orchestrator.store.runs.steps import IsolationMarks, StepStore
from stepfleet.orchestrator.store.runs.submission import RunSubmission
from stepfleet.orchestrator.store.runs.timeline import Timelines
from stepfleet.orchestrator.store.runs.tool_calls import ToolCalls

FIRST_CONTACT_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
_PROTOCOL = 2  # replies of streams and scores differ in RESP3
LARGEST_SHARDS = 4096


class Store(Opened):
    """An open store, with a gateway for each subject, made at its first use.

    `open_store` makes it; whoever reads or writes runs has it, or one of its gateways.
    """

    async def aclose(self) -> None:
        """Disconnect."""
        await self.connection.aclose()

    def admission(self, caller: str) -> AdmissionCalls:
        """Return the requests for leave to call models, of the worker's loop `caller`."""
        return AdmissionCalls(self, caller)

    @cached_property
    def steps(self) -> StepStore:
        """The steps of runs, for workers."""
        return StepStore(self, self.calls)

    @cached_property
    def calls(self) -> ToolCalls:
        """Tool calls with tasks of their own."""
        return ToolCalls(self)

    @cached_property
    def marks(self) -> IsolationMarks:
        """Notes about isolated processes."""
        return IsolationMarks(self)

    @cached_property
    def runs(self) -> RunReader:
        """Single runs, and why some failed."""
        return RunReader(self)

    @cached_property
    def results(self) -> RunResults:
        """Results of many ended runs."""
        return RunResults(self)

    @cached_property
    def lists(self) -> RunLists:
        """Lists and trees of runs."""
        return RunLists(self, self.links)

    @cached_property
    def timelines(self) -> Timelines:
        """The steps of a run, for pages."""
        return Timelines(self, self.lists)

    @cached_property
    def links(self) -> Links:
        """Who waits for a run, and what it passes on."""
        return Links(self)

    @cached_property
    def dependents(self) -> Dependents:
        """Runs that wait for others before they begin."""
        return Dependents(self)

    @cached_property
    def submission(self) -> RunSubmission:
        """New runs."""
        return RunSubmission(self)

    @cached_property
    def control(self) -> Control:
        """Requests to single runs: cancel, pause, resume, retry, send."""
        return Control(self)

    @cached_property
    def purging(self) -> Purging:
        """The removal of ended runs."""
        return Purging(self, self.batches, self.returning)

    @cached_property
    def approvals(self) -> ApprovalStore:
        """Calls that wait for people."""
        return ApprovalStore(self, self.calls)

    @cached_property
    def batches(self) -> Batches:
        """Batches as wholes."""
        return Batches(self)

    @cached_property
    def requests(self) -> BatchRequests:
        """Requests to whole batches."""
        return BatchRequests(self, self.batches)

    @cached_property
    def follow_ups(self) -> FollowUpIndex:
        """Batches that follow others."""
        return FollowUpIndex(self, self.batches)

    @cached_property
    def upkeep(self) -> BatchUpkeep:
        """What is done when a batch is over."""
        return BatchUpkeep(self, self.batches, self.follow_ups, self.requests)

    @cached_property
    def archiving(self) -> Archiving:
        """Moves of ended runs to the archive."""
        return Archiving(self, self.batches, self.upkeep, self.archive_files)

    @cached_property
    def archive_files(self) -> ArchiveFiles:
        """The files of the archive."""
        return ArchiveFiles(self)

    @cached_property
    def returning(self) -> Returning:
        """Returns of archived runs, and their end."""
        return Returning(self, self.archive_files)

    @cached_property
    def schedules(self) -> Schedules:
        """Batches that are submitted again and again."""
        return Schedules(self)

    @cached_property
    def limits(self) -> LimitStore:
        """Limits, their use, and who waits for which."""
        return LimitStore(self)

    @cached_property
    def circuits(self) -> Circuits:
        """Outages of the services of models."""
        return Circuits(self)

    @cached_property
    def ledger(self) -> Ledger:
        """What was spent, day by day."""
        return Ledger(self)

    @cached_property
    def cache(self) -> CacheEntries:
        """The response cache."""
        return CacheEntries(self)

    @cached_property
    def feeds(self) -> Feeds:
        """Events that are to be broadcast."""
        return Feeds(self)

    @cached_property
    def chunks(self) -> Chunks:
        """Streamed text."""
        return Chunks(self)

    @cached_property
    def audit(self) -> Audit:
        """Who changed what from the dashboard."""
        return Audit(self)


async def open_store(
    settings: Settings,
    app: Celery | None = None,
    *,
    worker: str = "",
    crash: Callable[[str], None] = lambda _: None,
) -> Store:
    """Connect, and fix the number of shards if this is the store's first use.

    The store's own number holds where the settings leave it to the default. Raises `StoreError`
    after a few seconds when Redis cannot be reached, `ConfigurationError` when the URL is
    unusable, the password is refused, or the settings ask for another number of shards. `worker`
    is the name of the worker process that opens it; `crash` is called where tests end that.
    """
    in_script = settings.enqueues_in_script  # raises, before anything is open
    connection, client = _connection(settings)
    try:
        shards = await _first_contact(client, settings)
    except BaseException:
        await connection.aclose()
        raise
    names = Keys(shards, settings.prefix)
    dispatch = Dispatch(
        app or client_app(settings),
        connection,
        settings.queue,
        in_script=in_script,
        signing=settings.signing,
        prefix=settings.queue_prefix,
    )
    configs = Configs(connection, names)
    return Store(settings, connection, names, configs, dispatch, worker, crash)


def place_of(url: str) -> str:
    """Return where a URL points to, without user and password."""
    if is_sentinel(url):
        return parse_sentinel(url).location
    if is_cluster(url):
        return parse_cluster(url).location
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    return f"{parts.hostname or 'localhost'}:{parts.port or 6379}"


class ClusterConnection(Connection):
    """A connection as the store uses it, to a cluster."""

    def __init__(
        self,
        seeds: tuple[NodeAddress, ...],
        connect: Callable[[NodeAddress], Redis],
        *,
        patience: float,
    ) -> None:
        self.cluster = Cluster(seeds, connect, lambda: self.patience)
        super().__init__(self.cluster.client_of(seeds[0]), patience=patience)

    def send(self, *command: Any) -> "asyncio.Future[Any]":
        """Put one command on its way and return the future of its reply; fails as `execute`."""
        return self.cluster.send(*command)

    async def timed(self, *commands: tuple[Any, ...]) -> tuple[list[Any], float]:
        """Return the replies, or errors, of commands, and the seconds until the last one was there.

        The nodes have no clock in common, so the way there and back is part of it.
        """
        began = time.monotonic()
        sent = [self.send(*command) for command in commands]
        replies: list[Any] = await asyncio.gather(*sent, return_exceptions=True)
        return replies, time.monotonic() - began

    async def attempt(self, *command: Any) -> Any:
        """Return the reply to a command that waits for no trouble's end; raises `StoreError`."""
        return await self.cluster.attempt_soon(*command)

    async def everywhere(self, *command: Any) -> list[Any]:
        """Return all masters' replies to a command without a key; it is not repeated."""
        return await self.cluster.everywhere(*command)

    async def servers(self) -> list[Redis]:
        """Return a client of each master."""
        return await self.cluster.master_clients()

    async def aclose(self) -> None:
        """Finish what is under way and disconnect; calls that wait for Redis raise `StoreError`."""
        await self.cluster.aclose()


def _cluster_connection(settings: Settings, **options: Any) -> ClusterConnection:
    """Return a connection to the cluster; `options` are redis-py's for each node's pool.

    Nothing is sent yet. Raises `ConfigurationError` for an unusable URL.
    """
    try:
        url = parse_cluster(settings.store)
    except ValueError as error:
        raise ConfigurationError(f"STEPFLEET_REDIS_URL: {error}") from None

    def connect(place: NodeAddress) -> Redis:
        pool = RenewablePool(
            connection_class=PlainConnection if url.tls is None else SSLConnection,
            host=place[0],
            port=place[1],
            username=url.username,
            password=url.password,
            **(url.tls or {}),
            **options,
        )
        pack_faster(pool)
        return Redis.from_pool(pool)

    return ClusterConnection(url.nodes, connect, patience=settings.patience)


class _FirstContact:
    """Reads a cluster as `redis.asyncio.Redis` reads one server, without repetitions."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def get(self, key: str) -> Any:
        """Return a key's value."""
        return await self._once("GET", key)

    async def setnx(self, key: str, value: Any) -> Any:
        """Set a key that is not there."""
        return await self._once("SETNX", key, value)

    async def _once(self, *command: Any) -> Any:
        try:
            return await self._cluster.attempt(*command)
        except exceptions.ClusterDownError as error:
            # Passes: a cluster that just starts, or one that elects a master.
            raise exceptions.ConnectionError(f"the cluster serves no such slot: {error}") from None
        except exceptions.ResponseError as error:
            if "cluster support disabled" not in str(error):
                raise
            msg = "the Redis that STEPFLEET_REDIS_URL names is not a cluster; write redis://HOST:PORT/0"
            raise ConfigurationError(msg) from None


def _connection(settings: Settings) -> tuple[Connection, Redis | _FirstContact]:
    """Return the connection, and a client of it for the first reads, which do not wait."""
    if is_cluster(settings.store):
        cluster = _cluster_connection(settings, **_options(settings))
        return cluster, _FirstContact(cluster.cluster)
    client = _client(settings)
    return Connection(client, patience=settings.patience), client


def _options(settings: Settings) -> dict[str, Any]:
    return {
        "max_connections": settings.connections,
        "timeout": settings.patience or None,
        "decode_responses": True,
        "protocol": _PROTOCOL,
        "socket_connect_timeout": SILENCE_SECONDS,
        "socket_timeout": SILENCE_SECONDS,
        "health_check_interval": 30,
    }


def _client(settings: Settings) -> Redis:
    url = settings.store
    make_pool = master_pool if is_sentinel(url) else RenewablePool.from_url
    pool = make_pool(url, **_options(settings))
    pack_faster(pool)
    return Redis.from_pool(pool)


async def _first_contact(client: Redis | _FirstContact, settings: Settings) -> int:
    """Return the store's number of shards; wait a little for a server that just starts."""
    where = place_of(settings.store)
    deadline = time.monotonic() + min(FIRST_CONTACT_SECONDS, settings.patience)
    loaded_by = time.monotonic() + settings.patience
    while True:
        try:
            return await _shards(client, settings)
        except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
            msg = (
                f"Redis at {where} refuses the credentials: {error}; put the right ones into "
                "STEPFLEET_REDIS_URL (redis://USER:PASSWORD@host:6379/0)"
            )
            raise ConfigurationError(msg) from None
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
            loading = isinstance(error, exceptions.BusyLoadingError)
            if time.monotonic() >= (loaded_by if loading else deadline):
                why = str(error).rstrip(".")
                msg = (
                    f"Redis at {where} cannot be reached: {why}; start it, or correct "
                    "STEPFLEET_REDIS_URL"
                )
                raise StoreError(msg) from None
        except exceptions.MovedError:
            msg = (
                f"Redis at {where} is a node of a Redis Cluster; write "
                f"STEPFLEET_REDIS_URL=redis+cluster://{where}"
            )
            raise ConfigurationError(msg) from None
        except exceptions.RedisError as error:
            raise StoreError(f"Redis at {where} refuses: {error}") from None
        await asyncio.sleep(_PAUSE_SECONDS)


async def _shards(client: Redis | _FirstContact, settings: Settings) -> int:
    key = settings.prefix + keys.SHARDS
    stored = await client.get(key)
    if stored is None:  # a full Redis refuses even a write that changes nothing
        await client.setnx(key, settings.shards)
        stored = await client.get(key)
    shards = int(stored) if stored and stored.isdigit() else 0
    if not 1 <= shards <= LARGEST_SHARDS:
        msg = f"key {key!r} holds {stored!r}; this is not a store of Stepfleet: name another"
        raise ConfigurationError(msg)
    if shards != settings.shards and "shards" in settings.model_fields_set:
        msg = (
            f"this store was set up with {shards} shards and the settings say "
            f"{settings.shards}; set STEPFLEET_SHARDS={shards}, or leave it out"
        )
        raise ConfigurationError(msg)
    return shards
