"""Clients behind real Sentinels: what they find, what they are told, what `doctor` says."""

import asyncio
import json
from collections.abc import Iterator

import pytest
import redis
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, free_port
from support.servers.sentinel_fleet import SERVICE, SentinelFleet, sentinel_fleet

from stepfleet.orchestrator import Agent, AsyncFleet, ConfigurationError, StoreError
from stepfleet.orchestrator.events.broadcast import RedisPubSub
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.dispatch import client_app
from stepfleet.orchestrator.store.fleet.checks import State, sentinels
from stepfleet.orchestrator.store.fleet.servers import (
    SentinelFacts,
    redis_facts,
    sentinel_facts,
)
from stepfleet.orchestrator.store.store import open_store

AGENT = Agent(name="plain", model="openai:scripted", instructions="Answer.")


@pytest.fixture(scope="module")
def guarded() -> Iterator[SentinelFleet]:
    """One fleet for tests that leave it as it is; Redis and Sentinels have passwords."""
    own = ("requirepass watchword",)
    with sentinel_fleet(sentinels=own, requirepass="geheim") as found:
        yield found


def url_of(fleet: SentinelFleet, service: str = SERVICE, word: str = "watchword") -> str:
    return f"{fleet.url.replace(f'/{SERVICE}/', f'/{service}/')}?sentinel_password={word}"


async def test_a_client_finds_the_master_with_both_passwords(guarded: SentinelFleet) -> None:
    async with AsyncFleet(url_of(guarded)) as fleet:
        run_id = await fleet.submit(AGENT, "hello")
        assert (await fleet.overview()).active >= 1
    with guarded.client(guarded.master) as client:
        assert client.role()[0] == "master"
        assert any(run_id in key for key in client.scan_iter("*run*"))
        assert any(run_id in message for message in _bodies(client))


async def test_a_client_publishes_through_kombus_own_transport(guarded: SentinelFleet) -> None:
    """As where the broker is another Redis than the store."""
    settings = load_settings(redis_url=url_of(guarded), enqueue="publish", queue="beside")
    app = client_app(settings)
    opened = await open_store(settings, app)
    try:
        await opened.dispatch.publish([(Work("a-run", 3), "plain")])
        assert await opened.dispatch.waiting() == 1
    finally:
        await opened.aclose()
        app.close()
    with guarded.client(guarded.master) as client:
        [message] = client.lrange("beside", 0, -1)
        assert json.loads(message)["headers"]["argsrepr"].startswith("['a-run', 3]")


@pytest.mark.parametrize(
    ("service", "password", "said"),
    [
        ("another", "watchword", "the Sentinels know no service 'another'"),
        (SERVICE, "wrong", "no Sentinel answers"),
    ],
)
async def test_what_the_sentinels_refuse_is_reported_within_seconds(
    guarded: SentinelFleet, service: str, password: str, said: str
) -> None:
    fleet = AsyncFleet(url_of(guarded, service, password))
    with pytest.raises(StoreError, match=said) as caught:
        await fleet.check()
    assert "geheim" not in str(caught.value)
    assert f"{service} (Sentinel 127.0.0.1:" in str(caught.value)


async def test_a_wrong_password_of_redis_is_reported_with_the_fix(guarded: SentinelFleet) -> None:
    fleet = AsyncFleet(url_of(guarded).replace("geheim", "falsch"))
    with pytest.raises(ConfigurationError, match="refuses the credentials"):
        await fleet.check()


async def test_dead_sentinels_are_reported_within_seconds() -> None:
    fleet = AsyncFleet(f"sentinel://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/{SERVICE}/0")
    with pytest.raises(StoreError, match="no Sentinel answers"):
        await fleet.check()


async def test_one_living_sentinel_suffices(guarded: SentinelFleet) -> None:
    dead = f"@127.0.0.1:{free_port()},"
    async with AsyncFleet(url_of(guarded).replace("@", dead)) as fleet:
        await fleet.check()
        assert (await fleet.overview()).redis_version


async def test_events_are_published_where_the_master_is(guarded: SentinelFleet) -> None:
    broadcaster = RedisPubSub.at(url_of(guarded))
    heard: list[bytes] = []
    with guarded.client(guarded.master) as client, client.pubsub() as channel:
        channel.subscribe("agent.x")
        channel.get_message(timeout=60)
        await broadcaster.broadcast("agent.x", {"session_id": "x"})
        wait_until(lambda: _hear(channel, heard), within=30, what="the event")
    await broadcaster.aclose()
    assert json.loads(heard[0]) == {"session_id": "x"}


def test_doctors_questions_reach_master_and_sentinels(guarded: SentinelFleet) -> None:
    facts = redis_facts(url_of(guarded))
    assert facts.server.append_only is True
    found = sentinel_facts(url_of(guarded))
    assert (found.named, found.answering, found.known, found.quorum) == (3, 3, 3, 2)
    assert found.replicas == 1
    assert sentinels(found).state is State.OK
    with pytest.raises(StoreError, match=r"fleet-2 \(behind Sentinel\) cannot be reached"):
        redis_facts(url_of(guarded, "fleet-2"))


@pytest.mark.parametrize(
    ("facts", "fix"),
    [
        (SentinelFacts(named=3, answering=2, known=3, quorum=2, replicas=1), "start them"),
        (SentinelFacts(named=1, answering=1, known=1, quorum=1, replicas=1), "three or more"),
        (SentinelFacts(named=3, answering=3, known=3, quorum=2, replicas=0), "start a replica"),
    ],
)
def test_doctor_warns_of_sentinels_that_could_not_fail_over(facts: SentinelFacts, fix: str) -> None:
    check = sentinels(facts)
    assert check.state is State.WARN
    assert fix in check.fix


@pytest.mark.timeout(420)
async def test_calls_wait_for_the_failover_and_find_the_new_master() -> None:
    """The server that was master is not written to, also when it is back.

    A Sentinel that was not run for some seconds trusts no clock, and decides nothing for a while.
    """
    with sentinel_fleet() as fleet:
        former = fleet.master
        store = await open_store(load_settings(redis_url=fleet.url, patience=300))
        try:
            await store.connection.execute("SET", "a", 1)
            await asyncio.to_thread(former.kill)
            assert await store.connection.execute("SET", "a", 2)
            await asyncio.to_thread(former.start)
            assert await store.connection.execute("SET", "a", 3)
        finally:
            await store.aclose()
        wait_until(lambda: _role(fleet, former) == "slave", within=100, what="the old master tamed")
        with fleet.client(fleet.master) as client:
            assert client.get("a") == "3"


def _hear(channel: "redis.client.PubSub", heard: list[bytes]) -> bool:
    message = channel.get_message(timeout=1)
    if message and message["type"] == "message":
        heard.append(message["data"])
    return bool(heard)


def _role(fleet: SentinelFleet, server: RedisServer) -> str:
    with fleet.client(server) as client:
        return str(client.role()[0])


def _bodies(client: redis.Redis) -> list[str]:
    return [json.loads(one)["headers"]["argsrepr"] for one in client.lrange("stepfleet", 0, -1)]
