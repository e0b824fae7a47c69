"""The quarantine in a real Redis, and what is told of it."""

import pytest
import redis
from support.servers.redis_cluster import RedisCluster
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.fleet.quarantine import KEPT_ENTRIES, entry, keep_aside
from stepfleet.orchestrator.store.fleet.servers import redis_facts, refused_messages
from stepfleet.orchestrator.store.store import open_store


@pytest.fixture(params=["one Redis", "a cluster"])
def url(
    request: pytest.FixtureRequest, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> str:
    redis_server.flush()
    if request.param == "one Redis":
        return redis_server.url
    cluster: RedisCluster = request.getfixturevalue("cluster")
    cluster.flush()
    monkeypatch.setenv("STEPFLEET_BROKER_URL", redis_server.url)
    return cluster.url


async def test_what_is_put_aside_is_counted_by_reason_and_the_oldest_make_room(url: str) -> None:
    store = await open_store(load_settings(redis_url=url))
    for number in range(KEPT_ENTRIES + 10):
        why = "rare" if number % 100 == 99 else "frequent"
        await keep_aside(store.connection, entry(b"\xff\x00", why, "stepfleet", at=float(number)))
    await store.aclose()
    facts = redis_facts(url)
    assert facts.quarantined == KEPT_ENTRIES
    assert facts.refusals == {"frequent": KEPT_ENTRIES - 10, "rare": 10}
    found = refused_messages([url])
    assert [one["at"] for one in found[:2]] == [KEPT_ENTRIES + 9, KEPT_ENTRIES + 8]


def test_entries_that_somebody_else_wrote_are_counted_too(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.lpush("sf:quarantine", b"\xff\xfe", b"{}", b'{"at": "x"}\n', b"[1]", b"")
        client.lpush("sf:quarantine", b'{"at":1e400,"reason":"r","queue":"q","bytes":1}\nx')
        client.lpush(
            "sf:quarantine", b'{"at":1,"reason":"' + b"r" * 5000 + b'","queue":"","bytes":1}'
        )
    told = redis_facts(redis_url)
    assert told.quarantined == 7
    assert sum(told.refusals.values()) == 7
    assert max(map(len, told.refusals)) <= 300
    assert len(refused_messages([redis_url])) == 7


def test_a_key_of_another_kind_is_no_quarantine(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.set("sf:quarantine", "mine")
    assert redis_facts(redis_url).refusals == {}


def test_a_broker_that_is_no_redis_has_none() -> None:
    assert refused_messages(["amqp://guest@127.0.0.1:1//"]) == []
