"""A link that carries little: what is large gets through, and only silence ends a wait."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

import pytest
from support.deadlines import until
from support.servers.redis_servers import RedisServer
from support.servers.trouble_proxy import troubled

from stepfleet.orchestrator import Agent, AsyncFleet
from stepfleet.orchestrator.redis_client.node import LARGEST_BYTES, LARGEST_TRIP, Call, next_trip
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store import dispatch, store
from stepfleet.orchestrator.store.store import open_store

Servers = Callable[..., RedisServer]
SILENCE = 1.0
RATE = 700_000
LARGE = "x" * 1_500_000
"""So much takes twice as long as a silence may, in either direction."""


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests take a fraction of the time; the rate and the sizes are chosen for it."""
    for module in (store, dispatch):
        monkeypatch.setattr(module, "SILENCE_SECONDS", SILENCE)


@pytest.mark.usefixtures("short_silence")
async def test_what_takes_longer_than_a_silence_gets_through_in_both_directions(
    own_redis: Servers,
) -> None:
    with troubled(own_redis().port) as proxy:
        proxy.throttle(RATE)
        store = await open_store(load_settings(redis_url=proxy.url, patience=60))
        try:
            began = time.monotonic()
            assert await store.connection.execute("SET", "large", LARGE)
            assert await store.connection.execute("GET", "large") == LARGE
            assert time.monotonic() - began > 2.5 * SILENCE
            assert proxy.connections <= 3, "no call was broken off and made again"
        finally:
            await store.aclose()


@pytest.mark.usefixtures("short_silence")
async def test_a_silent_server_is_still_noticed_soon(own_redis: Servers) -> None:
    with troubled(own_redis().port) as proxy:
        store = await open_store(load_settings(redis_url=proxy.url, patience=120))
        try:
            await store.connection.execute("PING")
            connected = proxy.connections
            proxy.stall()
            waiting = asyncio.ensure_future(store.connection.execute("GET", "nothing"))

            async def broken_off() -> bool:
                return proxy.connections > connected

            await until(broken_off, within=60)
            proxy.heal()
            assert await waiting is None
        finally:
            await store.aclose()


def test_a_trip_is_bounded_in_calls_and_in_bytes() -> None:
    def calls(count: int, size: int) -> deque[Call]:
        return deque(Call(("SET", f"k{n}", "v" * size), reply=None) for n in range(count))  # type: ignore[arg-type]

    assert len(next_trip(calls(2 * LARGEST_TRIP, 10))) == LARGEST_TRIP
    pending = calls(100, 250_000)
    assert len(next_trip(pending)) == LARGEST_BYTES // 250_000
    assert len(pending) == 100 - LARGEST_BYTES // 250_000
    assert len(next_trip(calls(3, 10 * LARGEST_BYTES))) == 1
    assert next_trip(deque[Call]()) == []


@pytest.mark.usefixtures("short_silence")
async def test_long_lines_are_submitted_over_a_slow_link_without_repetition(
    own_redis: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """Each line crosses the link once, however long all of them take."""
    agent = Agent("plain", model="openai:none", instructions="Be brief.")
    lines = [{"id": f"{n}", "input": "y" * 250_000} for n in range(10)]
    with troubled(own_redis().port) as proxy:
        proxy.throttle(RATE)
        async with AsyncFleet(proxy.url) as fleet:
            batch = await fleet.submit_batch(lines, agent=agent)
            progress = await batch.progress()
        assert progress.total == len(lines)
        assert progress.done == 0
        assert proxy.forwarded < 1.5 * len(lines) * 250_000
    assert "does not answer" not in caplog.text
