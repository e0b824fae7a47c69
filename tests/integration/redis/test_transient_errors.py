"""One connection in every trouble that Redis can have: it waits, goes on, and never spins."""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from support.deadlines import until, wait_until
from support.servers.redis_servers import RedisServer
from support.servers.trouble_proxy import TroubleProxy, troubled

from stepfleet.orchestrator import Agent, AsyncFleet, StoreError
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.lua import digest
from stepfleet.orchestrator.store.store import open_store
from stepfleet.worker.runtime.rescuer import Rescuer

Servers = Callable[..., RedisServer]
AGENT = Agent(name="plain", model="openai:scripted", instructions="Answer.")
MOST_PER_SECOND = 20
"""Attempts while Redis is away: new connections and their greetings, a second apart at most."""


@pytest.fixture
def server(own_redis: Servers) -> RedisServer:
    return own_redis()


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[TroubleProxy]:
    with troubled(server.port) as found:
        yield found


@pytest.fixture
async def connection(proxy: TroubleProxy) -> AsyncIterator[Connection]:
    async with opened(proxy.url) as found:
        yield found


@contextlib.asynccontextmanager
async def opened(url: str, **settings: object) -> AsyncIterator[Connection]:
    store = await open_store(load_settings(redis_url=url, **settings))
    try:
        yield store.connection
    finally:
        await store.aclose()


def plain(server: RedisServer) -> redis.Redis:
    return redis.Redis(port=server.port, decode_responses=True, retry=Retry(NoBackoff(), 0))


def errors_of(server: RedisServer, kind: str) -> int:
    with plain(server) as client:
        return int(client.info("errorstats").get(f"errorstat_{kind}", {}).get("count", 0))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def all_set(connection: Connection, count: int) -> None:
    await connection.execute_all(*(("SET", f"k{n}", n) for n in range(count)))


async def test_calls_wait_while_redis_is_away_and_are_answered_when_it_is_back(
    connection: Connection, proxy: TroubleProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """However many wait: they look for it together, and one line says so."""
    proxy.cut()
    before, began = proxy.attempts, time.monotonic()
    waiting = [asyncio.create_task(connection.execute("INCR", "n")) for _ in range(2000)]
    await until(_has_passed(began + 3), within=30, what="three seconds")
    await until(_is(lambda: proxy.attempts - before > 1), within=30, what="several attempts")
    attempts, lasted = proxy.attempts - before, time.monotonic() - began
    assert not any(task.done() for task in waiting)
    proxy.heal()
    assert sorted(await asyncio.gather(*waiting)) == list(range(1, 2001))
    assert attempts < MOST_PER_SECOND * (lasted + 1)
    await until(_was_said(connection, caplog, "Redis answers again"), within=30)
    began_line, _ended = said(caplog)
    assert began_line.startswith("Redis does not answer (")


async def test_an_attempt_that_fails_is_a_trouble_though_nobody_waits(
    connection: Connection, proxy: TroubleProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker without a step says that its Redis is away; no failure counts as an answer."""
    await connection.execute("PING")
    proxy.cut()

    for _ in range(2):
        with pytest.raises((StoreError, redis.RedisError, OSError)):
            await connection.attempt("PING")
        # Longer than a trouble is remembered after its last failure.
        await until(_has_passed(time.monotonic() + 1.2), within=30, what="a while")
    assert caplog.text.count("Redis does not answer") == 1
    assert "answers again" not in caplog.text
    proxy.heal()
    assert await connection.execute("PING")


async def test_a_redis_that_hangs_is_left_for_another_connection(
    connection: Connection, proxy: TroubleProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """No answer for five seconds: the connection is dead, though nobody closed it."""
    await all_set(connection, 10)
    proxy.stall()
    call = asyncio.create_task(connection.execute("SET", "late", 1))
    await until(_was_said(None, caplog, "Redis does not answer"), within=30)
    proxy.heal()
    assert await call
    assert len([line for line in said(caplog) if "waiting for it" in line]) == 1


async def test_a_slow_redis_is_no_trouble(
    connection: Connection, proxy: TroubleProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls that come meanwhile travel together: a thousand need a few round trips."""
    proxy.slow_down(0.2)
    before = proxy.requests
    await all_set(connection, 1000)
    assert proxy.requests - before < 100
    assert said(caplog) == []


async def test_a_full_redis_refuses_writes_and_answers_reads(
    connection: Connection, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """What is refused waits aside, and one of it asks now and then; the rest passes."""
    await connection.execute("SET", "seen", "x")
    with plain(server) as client:
        client.config_set("maxmemory", "1mb")
        refused = errors_of(server, "OOM")
        writes = [asyncio.create_task(connection.execute("SET", n, n)) for n in range(500)]
        began = time.monotonic()
        while time.monotonic() - began < 3:
            assert await connection.execute("GET", "seen") == "x"
            await asyncio.sleep(0.05)  # the pace of one that reads
        lasted = time.monotonic() - began
        assert errors_of(server, "OOM") - refused < 500 + MOST_PER_SECOND * (lasted + 1)
        assert not any(task.done() for task in writes)
        client.config_set("maxmemory", "0")
    await asyncio.gather(*writes)
    assert said(caplog)[0].startswith("Redis refuses commands (")
    assert len([line for line in said(caplog) if "waiting for it" in line]) == 1


async def test_a_master_that_became_a_replica_is_waited_for_over_new_connections(
    connection: Connection, server: RedisServer, proxy: TroubleProxy
) -> None:
    """The name may lead to the new master by now."""
    await all_set(connection, 1)
    with plain(server) as client:
        client.replicaof("127.0.0.1", "1")
        refused, connections = errors_of(server, "READONLY"), proxy.connections
        write = asyncio.create_task(connection.execute("SET", "w", 1))
        wait = _is(lambda: proxy.connections >= connections + 3)
        await until(wait, within=30, what="new connections")
        assert errors_of(server, "READONLY") - refused < 50
        client.replicaof("NO", "ONE")
    assert await write


async def test_a_redis_that_a_script_blocks_is_waited_for(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with plain(server) as client, plain(server) as killer:
        client.config_set("busy-reply-threshold", "50")
        async with opened(server.url) as connection:
            await all_set(connection, 1)
            script = threading.Thread(target=_block, args=(client,))
            script.start()
            await until(_is(lambda: _is_busy(server)), within=30)
            write = asyncio.create_task(connection.execute("SET", "w", 1))
            await until(_was_said(None, caplog, "BUSY"), within=30)
            killer.script_kill()
            assert await write
            script.join()


async def test_a_redis_that_loads_its_data_is_waited_for(
    own_redis: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    server = own_redis(key_load_delay="300", loading_process_events_interval_bytes="1024")
    async with opened(server.url) as connection:
        await all_set(connection, 5000)
        server.stop()
        start = threading.Thread(target=server.start)
        start.start()
        assert await connection.execute("GET", "k4999") == "4999"
        start.join()
    assert len([line for line in said(caplog) if "waiting for it" in line]) == 1


async def test_scripts_that_the_server_forgot_are_loaded_again(server: RedisServer) -> None:
    async with AsyncFleet(server.url) as fleet:
        await fleet.submit(AGENT, "one")
        with plain(server) as client:
            assert client.script_exists(digest("create")) == [True]
            client.script_flush()
            await fleet.submit(AGENT, "two")
            assert client.script_exists(digest("create")) == [True]


async def test_a_client_that_loses_patience_learns_why_and_may_submit_again(
    server: RedisServer, proxy: TroubleProxy
) -> None:
    """The submission that failed may have been made: its key makes the second one the same."""
    settings = load_settings(redis_url=proxy.url, patience=2)
    lines = [{"id": f"r{n}", "input": f"question {n}"} for n in range(20)]
    async with AsyncFleet(settings=settings) as fleet:
        await fleet.check()
        proxy.cut()
        with pytest.raises(StoreError, match="Redis cannot be reached"):
            await fleet.submit_batch(lines, AGENT, idempotency_key="monday")
        proxy.heal()
        first = await fleet.submit_batch(lines, AGENT, idempotency_key="monday")
        again = await fleet.submit_batch(lines, AGENT, idempotency_key="monday")
        assert first.id == again.id
        assert (await first.progress()).total == 20
        assert (await fleet.overview()).active == 20


async def test_a_client_of_a_full_redis_learns_the_fix_and_can_still_read(
    server: RedisServer,
) -> None:
    settings = load_settings(redis_url=server.url, patience=1)
    async with AsyncFleet(settings=settings) as fleet:
        run_id = await fleet.submit(AGENT, "before")
    with plain(server) as client:
        client.config_set("maxmemory", "1mb")
        async with AsyncFleet(settings=settings) as late:
            with pytest.raises(StoreError, match="raise its maxmemory, or remove ended runs"):
                await late.submit(AGENT, "after")
            assert (await late.runs.show(run_id)) is not None
        client.config_set("maxmemory", "0")


async def test_whoever_waits_for_ever_is_released_by_less_patience(
    connection: Connection, proxy: TroubleProxy
) -> None:
    """A worker waits as long as it runs; when it stops, what waits comes back soon."""
    connection.patience = math.inf
    proxy.cut()
    calls = [asyncio.create_task(connection.execute("PING")) for _ in range(3)]
    connections = proxy.connections
    await until(_is(lambda: proxy.connections >= connections + 5), within=30)
    assert not any(call.done() for call in calls)
    connection.patience = 0.0
    told = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
    assert all(isinstance(one, StoreError) for one in told)


async def test_closing_ends_the_calls_that_wait(proxy: TroubleProxy) -> None:
    async with opened(proxy.url, patience=1000) as connection:
        proxy.cut()
        call = asyncio.create_task(connection.execute("PING"))
        connections = proxy.connections
        await until(_is(lambda: proxy.connections > connections), within=30)
    with pytest.raises(StoreError):
        await call


async def test_nobody_loses_a_connection_to_another_callers_trouble(
    connection: Connection, proxy: TroubleProxy
) -> None:
    """Cuts at any moment of many calls: each call gets its own answer."""

    async def call(n: int) -> bool:
        value = f"v{n}"
        return bool(await connection.execute("ECHO", value) == value)

    answers: list[bool] = []
    for _ in range(10):
        calls = [asyncio.create_task(call(n)) for n in range(200)]
        await asyncio.sleep(0)
        proxy.cut()
        proxy.heal()
        answers += await asyncio.gather(*calls)
    assert all(answers)
    assert len(answers) == 2000


def test_the_proxy_of_these_tests_cuts_and_heals(server: RedisServer, proxy: TroubleProxy) -> None:
    with redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 0)) as client:
        assert client.ping()
        proxy.cut()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        proxy.heal()
        wait_until(client.ping, within=30)


def _is(check: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def asked() -> bool:
        return await asyncio.to_thread(check)

    return asked


def _has_passed(moment: float) -> Callable[[], Awaitable[bool]]:
    return _is(lambda: time.monotonic() >= moment)


def _was_said(
    connection: Connection | None, caplog: pytest.LogCaptureFixture, what: str
) -> Callable[[], Awaitable[bool]]:
    async def asked() -> bool:
        if connection is not None:
            await connection.execute("PING")
        return any(what in line for line in said(caplog))

    return asked


def _is_busy(server: RedisServer) -> bool:
    with plain(server) as client:
        try:
            client.ping()
        except redis.ResponseError as error:
            return "BUSY" in str(error)
    return False


def _block(client: redis.Redis) -> None:
    with contextlib.suppress(redis.RedisError):
        client.eval("while true do end", 0)


async def test_configurations_that_a_failover_lost_are_stored_again(
    server: RedisServer, proxy: TroubleProxy
) -> None:
    """A client and a worker that have stored them once do not rely on it for ever."""
    async with AsyncFleet(proxy.url) as fleet:
        await fleet.submit(AGENT, "before")
        store = await open_store(load_settings(redis_url=proxy.url))
        await store.configs.announce(AGENT.config)
        with plain(server) as client:
            client.delete(keys.AGENTS, keys.NAMES)
            proxy.cut()
            proxy.heal()
            await fleet.check()
            await fleet.submit(AGENT, "after")
            assert client.hkeys(keys.AGENTS) == [AGENT.config.digest]
            client.delete(keys.AGENTS)
            await store.connection.execute("PING")
            await store.configs.restore(AGENT.config)
            assert client.hkeys(keys.AGENTS) == [AGENT.config.digest]
            assert client.hgetall(keys.NAMES) == {"plain": AGENT.config.digest}
        await store.aclose()


async def test_a_broker_that_is_away_fails_no_submission(
    server: RedisServer, own_redis: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """The store has the runs, and a rescuer publishes them when the broker is back."""
    broker = own_redis()
    with troubled(broker.port) as way:
        settings = load_settings(redis_url=server.url, broker_url=way.url, grace=0.1)
        way.cut()
        async with AsyncFleet(settings=settings) as fleet:
            run_ids = [await fleet.submit(AGENT, f"question {n}") for n in range(20)]
        assert len([line for line in said(caplog) if "The broker, for publishing," in line]) == 1
        assert way.connections < 30
        store = await open_store(settings)
        rescuer = Rescuer(
            *(store.connection, store.keys, store.dispatch),
            grace=0.1,
            interval=0.1,
            long_queue=100,
            jitter=lambda: 0.5,
        )
        with pytest.raises(StoreError, match="the broker cannot be reached"):
            await rescuer.rescue()
        way.heal()

        async def all_are_sent() -> bool:
            await rescuer.rescue()
            with plain(broker) as client:
                sent = "".join(map(str, client.lrange("stepfleet", 0, -1)))
            return all(run_id in sent for run_id in run_ids)

        await until(all_are_sent, within=30, what="all runs sent")
        await store.aclose()
