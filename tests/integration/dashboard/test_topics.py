"""What open pages are told of a run's text: read from chunks as workers write them."""

import asyncio
import time
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import pytest
from support.deadlines import until

from stepfleet.orchestrator import Agent, AsyncFleet
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.client.watching.watch import Position, RunWatch
from stepfleet.orchestrator.dashboard import web as topics
from stepfleet.orchestrator.dashboard.web import LONGEST_TEXT, Topics
from stepfleet.orchestrator.events.envelope import Event, EventType
from stepfleet.orchestrator.store.runs.listing import LISTS


def chunk(
    run_id: str, step: int, attempt: int, index: int, text: str, *, end: bool = False
) -> Event:
    payload = {
        "step_number": step,
        "attempt": attempt,
        "chunk_index": index,
        "chunk": text,
        "is_complete": end,
    }
    return Event(EventType.STREAM_CHUNK, run_id, "e", datetime.now(UTC), payload)


async def test_the_newest_steps_text_is_shown_from_its_end_and_anew_with_each_attempt(
    redis_url: str,
) -> None:
    async with AsyncFleet(redis_url) as fleet, asyncio.timeout(60):
        store = await store_of(fleet)
        chunks = store.chunks
        run_id = await fleet.submit(Agent("clerk", model="openai:none"), "x")
        await chunks.add([chunk(run_id, 1, 1, 0, "old", end=True), chunk(run_id, 2, 1, 0, "lost")])
        async with aclosing(Topics(fleet).text(run_id)) as states:

            async def after(*written: Event) -> dict[str, Any]:
                await chunks.add(written)
                found: dict[str, Any] = await anext(states)
                return found

            first = await anext(states)
            assert first == {"step": 2, "text": "lost", "left_out": 0, "is_open": True}
            late, new = chunk(run_id, 1, 2, 0, "late"), chunk(run_id, 2, 2, 0, "<b>é")
            assert (await after(late, new))["text"] == "<b>é"
            long = await after(chunk(run_id, 2, 2, 1, "x" * LONGEST_TEXT, end=True))
            assert long == {"step": 2, "text": "x" * LONGEST_TEXT, "left_out": 4, "is_open": False}


async def commands_of(fleet: AsyncFleet) -> int:
    store = await store_of(fleet)
    return int((await store.connection.execute("INFO", "stats"))["total_commands_processed"])


async def test_a_run_that_has_ended_is_looked_at_rarely_and_found_when_it_goes_on(
    fleet: AsyncFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = 0.3
    monkeypatch.setattr(topics, "SECONDS", 0.0)
    monkeypatch.setattr(topics, "ENDED_SECONDS", pause)
    looks: list[float] = []
    moved = RunWatch.moved

    async def noted(*given: Any, **options: Any) -> Position:
        looks.append(time.monotonic())
        return await moved(*given, **options)

    async def has_looked() -> bool:
        return len(looks) >= 4

    monkeypatch.setattr(RunWatch, "moved", noted)
    run_id = await fleet.submit(Agent("clerk", model="openai:none"), "x")
    await fleet.runs.cancel(run_id)
    async with aclosing(Topics(fleet).run(run_id)) as states, asyncio.timeout(60):
        await anext(states)
        again = asyncio.ensure_future(anext(states))
        await until(has_looked, within=60, what="three more looks")
        assert looks[3] - looks[0] > 3 * pause * 0.9, "it is looked at like a run under way"
        assert not again.done()
        assert (await fleet.runs.retry(run_id)).outcome == "retried"
        await again


async def test_a_quiet_fleet_costs_little_and_each_change_is_found(
    fleet: AsyncFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "FLEET_SECONDS", 0.05)
    shards = (await store_of(fleet)).keys.shards
    looks, look = 0, topics._fleet

    async def noted(*given: Any) -> Any:
        nonlocal looks
        looks += 1
        return await look(*given)

    async def a_look_has_passed() -> None:
        before = looks

        async def has_looked() -> bool:
            return looks >= before + 2

        await until(has_looked, within=60, what="two looks")

    monkeypatch.setattr(topics, "_fleet", noted)
    async with aclosing(Topics(fleet).fleet()) as states, asyncio.timeout(60):
        await anext(states)
        quiet = asyncio.ensure_future(anext(states))
        await a_look_has_passed()
        assert not quiet.done()
        await fleet.limits.set("tenant:acme", usd=1)
        await quiet
        paused = asyncio.ensure_future(anext(states))
        await a_look_has_passed()
        await fleet.pause()
        await paused
        run_id = await fleet.submit(Agent("clerk", model="openai:none"), "x")
        await anext(states)
        await fleet.runs.cancel(run_id)
        before = await commands_of(fleet)
        await anext(states)
        assert await commands_of(fleet) - before < (2 + len(LISTS)) * shards * 3
