"""Replies that travel together: each caller gets its own, whatever kind it is."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from pydantic import SecretStr
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from support.deadlines import until

from stepfleet.orchestrator import Settings
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.redis_client.node import RenewablePool, exchange, pack_faster
from stepfleet.orchestrator.store.store import open_store


@pytest.fixture
async def connection(redis_url: str) -> AsyncIterator[Connection]:
    store = await open_store(Settings(redis_url=SecretStr(redis_url)))
    yield store.connection
    await store.aclose()


async def test_replies_of_every_kind_come_in_one_trip_and_in_order(connection: Connection) -> None:
    commands = [
        ("SET", "reply:text", "Zoë"),
        ("GET", "reply:text"),
        ("LPUSH", "reply:text", "x"),
        ("GET", "reply:missing"),
        ("RPUSH", "reply:list", "a", "b"),
        ("LRANGE", "reply:list", 0, -1),
        ("EVALSHA", "0" * 40, 0),
        ("EVAL", "return {1, {'deep', false}, 'end'}", 0),
        ("INCR", "reply:list"),
        ("HSET", "reply:hash", "field", "value"),
        ("HGETALL", "reply:hash"),
        ("ECHO", "last"),
    ]
    replies = await asyncio.gather(
        *(connection.send(*command) for command in commands), return_exceptions=True
    )
    refused = [at for at, reply in enumerate(replies) if isinstance(reply, ResponseError)]

    assert refused == [2, 6, 8]
    assert [reply for at, reply in enumerate(replies) if at not in refused] == [
        True,
        "Zoë",
        None,
        2,
        ["a", "b"],
        [1, ["deep", None], "end"],
        1,
        {"field": "value"},
        "last",
    ]


async def test_replies_larger_than_one_read_are_whole(connection: Connection) -> None:
    texts = [str(number) * 40_000 for number in range(10)]
    replies = await asyncio.gather(*(connection.send("ECHO", text) for text in texts))

    assert replies == texts


async def test_a_reply_that_nobody_took_answers_nobody_else(connection: Connection) -> None:
    client = connection.client
    await exchange(client, [("SET", "reply:text", "mine")])
    broken_off = asyncio.create_task(
        exchange(client, [("BLPOP", "reply:nothing", 1), ("ECHO", "somebody else's")])
    )
    await until(partial(anybody_blocked, connection), what="the blocked client")
    broken_off.cancel()
    with pytest.raises(asyncio.CancelledError):
        await broken_off

    assert await exchange(client, [("GET", "reply:text")]) == ["mine"]


async def test_replies_behind_one_that_makes_no_sense_answer_nobody_else(
    connection: Connection,
) -> None:
    client = connection.client
    callbacks: Any = client.response_callbacks
    callbacks["ECHO"] = int
    with pytest.raises(ValueError, match="not a number"):
        await exchange(client, [("ECHO", "not a number"), ("BLPOP", "reply:nothing", 1)])

    assert await exchange(client, [("ECHO", "6")]) == [6]


@pytest.fixture
async def resp3(redis_url: str) -> AsyncIterator[Redis]:
    """A client over RESP3 that packs; the pool that a store opens speaks RESP2 only."""
    pool = RenewablePool.from_url(redis_url, protocol=3, decode_responses=True, socket_timeout=5)
    pack_faster(pool)
    client = Redis.from_pool(pool)
    yield client
    await client.aclose()


async def test_replies_of_types_that_resp2_lacks_are_read_once(resp3: Redis) -> None:
    def script(value: str) -> tuple[Any, ...]:
        return ("EVAL", f"redis.setresp(3); return {value}", 0)

    values = ("{double=1.5}", "true", "false", "{map={a=1}}", "{set={x=true}}")
    replies = await exchange(
        resp3, [("ECHO", "first"), *(script(value) for value in values), ("ECHO", "last")]
    )

    assert replies[:4] == ["first", 1.5, True, False]
    assert replies[4] == {"a": 1}
    assert list(replies[5]) == ["x"]
    assert replies[6:] == ["last"]
    assert await exchange(resp3, [("ECHO", "after")]) == ["after"]


async def test_what_the_server_tells_unasked_is_nobodys_reply(resp3: Redis) -> None:
    commands = [
        ("CLIENT", "TRACKING", "ON"),
        ("SET", "reply:seen", "1"),
        ("GET", "reply:seen"),
        ("SET", "reply:seen", "2"),
        ("ECHO", "behind"),
        ("GET", "reply:seen"),
    ]
    replies = await exchange(resp3, commands)

    assert replies[2:] == ["1", True, "behind", "2"]


async def test_a_command_that_cannot_be_sent_fails_alone(connection: Connection) -> None:
    commands = [("SET", "reply:sent", "1"), ("HGET", "reply:hash", object()), ("GET", "reply:sent")]
    replies = await asyncio.gather(
        *(connection.send(*command) for command in commands), return_exceptions=True
    )

    assert replies[::2] == [True, "1"]
    assert isinstance(replies[1], Exception)


async def test_a_refusal_in_a_list_is_part_of_the_reply(connection: Connection) -> None:
    script = "return {redis.error_reply('ERR no'), 'yes'}"
    replies = await exchange(connection.client, [("ECHO", "x"), ("EVAL", script, 0), ("ECHO", "y")])

    assert isinstance(replies[1][0], ResponseError)
    assert replies[1][1:] == ["yes"]
    assert replies[::2] == ["x", "y"]


async def anybody_blocked(connection: Connection) -> bool:
    return bool((await connection.execute("INFO", "clients"))["blocked_clients"])
