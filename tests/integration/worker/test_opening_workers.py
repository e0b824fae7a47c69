"""What a worker process is made of: how it opens, opens again after a failure, and ends."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis
from support.deadlines import until
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator import Agent, StoreError
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.dispatch import client_app
from stepfleet.worker.engine.bridge import PerLoop
from stepfleet.worker.engine.loop_thread import LoopThread
from stepfleet.worker.engine.pool.asyncio_pool import _close_everything
from stepfleet.worker.events import subscribers as sinks
from stepfleet.worker.events.subscribers import SubscriberQueue
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.runtime import upkeep
from stepfleet.worker.runtime.process import Opening
from stepfleet.worker.runtime.upkeep import process_name
from stepfleet.worker.runtime.worker import Worker
from stepfleet.worker.telemetry.instrumentation import instrument

LONG = 60.0


def made(redis_url: str) -> Opening:
    settings = load_settings(redis_url=redis_url)
    agents = [Agent("plain", model="openai:any")]
    given = (settings, agents, client_app(settings), Leases(time.monotonic))
    return Opening(partial(Worker.open, *given), instrument(settings, "w"))


def watches() -> list[str]:
    return [one.get_name() for one in asyncio.all_tasks() if one.get_name().startswith("stepfleet")]


def test_a_pool_that_ends_tells_subscribers_all_and_takes_its_leave(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """EVT-20: what was told before the end is heard, and nothing waits for its time to run out."""
    gate, told = asyncio.Event(), []
    settle = SubscriberQueue.settle

    async def opened_settle(listening: SubscriberQueue, seconds: float) -> None:
        gate.set()
        await settle(listening, seconds)

    async def hear() -> None:
        await gate.wait()
        told.append("one")

    async def begin() -> None:
        mine = per_loop()
        working = await mine.worker()
        for _ in range(3):
            working.listening.offer(hear)

    monkeypatch.setattr(SubscriberQueue, "settle", opened_settle)
    per_loop = PerLoop(lambda: made(redis_url), Opening.aclose)
    thread = LoopThread("ends")
    thread.start()
    asyncio.run_coroutine_threadsafe(begin(), thread.loop).result(LONG)
    with caplog.at_level(logging.WARNING):
        thread.stop(_close_everything(), within=LONG)
    assert told == ["one"] * 3
    assert caplog.text == ""
    with redis.Redis.from_url(redis_url) as client:
        assert client.hlen(keys.WORKERS) == 0


async def test_an_opening_that_fails_leaves_neither_watches_nor_connections(
    own_redis: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = own_redis()
    deliveries = sinks.deliveries

    async def fail(*_: Any) -> Any:
        raise StoreError("no feeds")

    monkeypatch.setattr(upkeep, "deliveries", fail)
    mine = made(server.url)
    with redis.Redis.from_url(server.url) as client:

        async def is_alone() -> bool:
            return len(client.client_list()) == 1

        for _ in range(3):
            with pytest.raises(StoreError, match="no feeds"):
                await mine.worker()
            assert watches() == []
            await until(is_alone, what="the end of its connections")
        monkeypatch.setattr(upkeep, "deliveries", deliveries)
        await mine.worker()
        assert len(watches()) == len(set(watches())) == 8
        await mine.aclose()
        await until(is_alone, what="the end of its connections")


async def test_a_part_that_fails_to_close_leaves_the_others_closed(
    own_redis: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = own_redis()

    async def fail(_: SubscriberQueue) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(SubscriberQueue, "aclose", fail)
    mine = made(server.url)
    await mine.worker()
    with pytest.raises(RuntimeError, match="broken"):
        await mine.aclose()
    assert watches() == []
    with redis.Redis.from_url(server.url) as client:

        async def is_alone() -> bool:
            return len(client.client_list()) == 1

        await until(is_alone, what="the end of its connections")
        assert client.hlen(keys.WORKERS) == 0


async def test_what_ran_already_ends_with_an_opening_that_fails_last(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def watch(self) -> Any:
            raise RuntimeError("broken")

        async def aclose(self) -> None:
            closed.append("courier")

    async def broken(*_: Any) -> Any:
        return [Broken()]

    closed: list[str] = []
    monkeypatch.setattr(upkeep, "deliveries", broken)
    mine = made(redis_url)
    with pytest.raises(RuntimeError, match="broken"):
        await mine.worker()
    assert watches() == []
    assert closed == ["courier"]
    monkeypatch.setattr(upkeep, "deliveries", sinks.deliveries)
    assert (await mine.worker()).store.worker == process_name()
    await mine.aclose()


async def test_services_that_end_while_they_open_connect_no_more(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = asyncio.Event()

    async def hang(*_: Any) -> Any:
        opening.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(upkeep, "deliveries", hang)
    mine = made(redis_url)
    asked = asyncio.create_task(mine.worker())
    await opening.wait()
    await mine.aclose()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert watches() == []


async def test_services_that_have_ended_are_not_opened(redis_url: str) -> None:
    mine = made(redis_url)
    await mine.aclose()
    with pytest.raises(StoreError, match="is ending"):
        await mine.worker()
