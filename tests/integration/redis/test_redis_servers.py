"""The servers that all other tests stand on."""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import redis
from support.servers.redis_servers import RedisServer

OwnRedis = Callable[..., RedisServer]


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with closing(redis.Redis.from_url(redis_url)) as connected:
        yield connected


@pytest.mark.parametrize("value", ["first", "second"])
def test_each_test_finds_an_empty_server(client: redis.Redis, value: str) -> None:
    assert client.dbsize() == 0
    client.set("left behind", value)


def test_the_server_keeps_an_append_only_file_and_evicts_nothing(client: redis.Redis) -> None:
    assert client.config_get("appendonly") == {"appendonly": "yes"}
    assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_the_port_lies_below_the_ephemeral_ones(redis_server: RedisServer) -> None:
    assert redis_server.port < 32768


def test_a_killed_server_comes_back_with_its_data(own_redis: OwnRedis) -> None:
    server = own_redis(appendfsync="always")
    with closing(redis.Redis.from_url(server.unix_url)) as client:
        client.set("kept", "1")
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        server.start()
        assert client.get("kept") == b"1"


def test_a_frozen_server_answers_after_it_is_thawed(own_redis: OwnRedis) -> None:
    server = own_redis()
    impatient = redis.Redis.from_url(server.url, socket_timeout=0.2, retry=None)
    with closing(impatient) as client:
        server.freeze()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        server.thaw()
    with closing(redis.Redis.from_url(server.url)) as patient:
        assert patient.ping()
