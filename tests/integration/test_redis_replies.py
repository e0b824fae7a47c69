"""Replies that travel together: each caller gets its own, whatever kind it is."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from deadlines import until
from pydantic import SecretStr
from redis.exceptions import ResponseError

from stepfleet.orchestrator.settings import Settings
from stepfleet.orchestrator.store.connection import Connection
from stepfleet.orchestrator.store.opening import open_store
from stepfleet.orchestrator.store.packing import exchange


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


async def anybody_blocked(connection: Connection) -> bool:
    return bool((await connection.execute("INFO", "clients"))["blocked_clients"])
