"""Starts of steps and tools come when they happen, once, to those who listen."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from redis.asyncio import Redis
from support.deadlines import until
from support.runs.scripted_steps import Script, call, say
from support.runs.tools import look

from stepfleet.orchestrator import Agent, AsyncFleet, Subscribers, tool
from stepfleet.orchestrator.client.rendering import LiveMessages
from stepfleet.orchestrator.client.watching.follow import LiveStarts
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.events.domain_events import DomainEvent, ToolCallStarted
from stepfleet.orchestrator.events.envelope import channel_of
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker

LONG = 60.0
Heard = list[dict[str, Any]]


class Gate:
    """A tool that is running from `begun` until the test sets `go_on`."""

    def __init__(self, **options: Any) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

        @tool(**options)
        def search(what: str) -> str:
            """Search for it."""
            self.begun.set()
            self.go_on.wait(LONG)
            return f"{what}: found"

        self.tool = search


def searcher(gate: Gate, **config: Any) -> Agent:
    answers = [call(("search", {"what": "x" * 50})), say("It is there.")]
    return Agent("searcher", model=Script(answers), tools=[gate.tool], **config)


@asynccontextmanager
async def working(
    redis_url: str, agent: Agent, run_id: str, **settings: Any
) -> AsyncIterator[None]:
    async with InlineWorker(load_settings(redis_url=redis_url, **settings), [agent]) as worker:
        task = asyncio.create_task(worker.finish(run_id))
        yield
        async with asyncio.timeout(LONG):
            await task


def starts(heard: Heard) -> list[tuple[str, int]]:
    names = ("agent.step.started", "agent.tool.started")
    return [
        (one["type"].split(".")[1], one["payload"].get("attempt", 0))
        for one in heard
        if one["type"] in names
    ]


async def test_a_tools_start_comes_while_it_runs_and_once(
    redis_url: str, fleet: AsyncFleet
) -> None:
    """The event without a number is seen live; who comes late sees the one with a number."""
    gate = Gate()
    agent = searcher(gate, broadcast="standard")
    run_id = await fleet.submit(agent, "hi", parent=await fleet.submit(agent, "other"))
    heard: Heard = []
    async with working(redis_url, agent, run_id), asyncio.timeout(LONG):
        async for event in fleet.runs.events(run_id, chunks=True):
            heard.append(event)
            if event["type"] == "agent.tool.started":
                assert not gate.go_on.is_set()
                assert (await fleet.runs.show(run_id)).log == ()
                gate.go_on.set()
    live = next(one for one in heard if one["type"] == "agent.tool.started")
    stored = [one async for one in fleet.runs.events(run_id)]
    (durable,) = [one for one in stored if one["type"] == "agent.tool.started"]
    assert live["payload"] == {**durable["payload"], "step_number": 1, "attempt": 1}
    kept = ("type", "session_id", "execution_id", "parent_agent_id")
    assert [live[name] for name in kept] == [durable[name] for name in kept]
    assert starts(heard)[:2] == [("step", 1), ("tool", 1)]
    told = [one for one in heard if one["type"] != "agent.stream.chunk"]
    assert [one["type"] for one in told] == [one["type"] for one in stored]
    numbers = [one["sequence"] for one in told if "sequence" in one]
    assert numbers == sorted(set(numbers))
    late = [one async for one in fleet.runs.events(run_id, chunks=True)]
    assert [one for one in late if one["type"] != "agent.stream.chunk"] == stored


async def test_a_call_on_a_queue_of_its_own_is_announced_by_the_worker_that_runs_it(
    redis_url: str, fleet: AsyncFleet
) -> None:
    gate = Gate(queue="gpu")
    agent = searcher(gate, broadcast="standard")
    run_id = await fleet.submit(agent, "hi")
    heard: Heard = []
    async with working(redis_url, agent, run_id), asyncio.timeout(LONG):
        async for event in fleet.runs.events(run_id, chunks=True):
            heard.append(event)
            if event["type"] == "agent.tool.started":
                gate.go_on.set()
    assert starts(heard)[:2] == [("step", 1), ("tool", 1)]
    assert [name for name, _ in starts(heard)] == ["step", "tool", "step"]


async def test_a_failed_attempts_start_is_followed_by_the_next_one(
    redis_url: str, fleet: AsyncFleet
) -> None:
    """Attempts are numbered like the chunks of text."""
    failures = [ModelError("busy", retryable=True)]

    async def first(_: Any) -> Any:
        if failures:
            raise failures.pop()
        return say("done")

    agent = Agent("patient", model=Script([first]), broadcast="standard")
    run_id = await fleet.submit(agent, "hi")
    heard: Heard = []
    async with working(redis_url, agent, run_id), asyncio.timeout(LONG):
        heard += [one async for one in fleet.runs.events(run_id, chunks=True)]
    assert [name for name, attempt in starts(heard) if attempt != 1] == ["step"]
    chunks = [one for one in heard if one["type"] == "agent.stream.chunk"]
    assert {one["payload"]["attempt"] for one in chunks} == {2}


async def test_subscribers_on_the_worker_are_called_at_the_start_and_once(
    redis_url: str, fleet: AsyncFleet
) -> None:
    """With whole arguments, also without a stream."""
    gate, heard, started_one = Gate(), list[DomainEvent](), threading.Event()

    def hears(event: DomainEvent) -> None:
        heard.append(event)
        if isinstance(event, ToolCallStarted):
            started_one.set()

    agent = searcher(gate, subscribers=Subscribers().wiretap(hears))
    run_id = await fleet.submit(agent, "hi")
    async with working(redis_url, agent, run_id):
        assert await asyncio.to_thread(started_one.wait, LONG)
        assert (await fleet.runs.show(run_id)).log == ()
        gate.go_on.set()
    assert Counter(type(one).__name__ for one in heard)["AgentStepStarted"] == 2
    (started,) = [one for one in heard if isinstance(one, ToolCallStarted)]
    assert started.args == {"what": "x" * 50}


@pytest.mark.parametrize("database", ["", "/3"])
async def test_a_channel_of_the_fleets_own_redis_has_each_start_once(
    redis_url: str, fleet: AsyncFleet, database: str
) -> None:
    """Text and starts come live, the other events from the feed; channels know no databases."""
    gate = Gate()
    agent = searcher(gate, broadcast="standard")
    run_id = await fleet.submit(agent, "hi")
    heard: Heard = []
    events_url = redis_url.removesuffix("/0") + database
    async with Redis.from_url(redis_url) as client, client.pubsub() as channel:
        await channel.subscribe(channel_of(run_id))

        async def hears(kind: str) -> bool:
            message = await channel.get_message(ignore_subscribe_messages=True)
            heard.extend([orjson.loads(message["data"])] if message else [])
            return any(one["type"] == kind for one in heard)

        async with working(redis_url, agent, run_id, events_url=events_url):
            await until(lambda: hears("agent.tool.started"), within=LONG)
            assert not gate.go_on.is_set()
            gate.go_on.set()

            async def ended() -> bool:
                await hears("agent.status")
                statuses = [one["payload"].get("status") for one in heard]
                return "completed" in statuses and len(starts(heard)) >= 3

            await until(ended, within=LONG)
    assert starts(heard) == [("step", 1), ("tool", 1), ("step", 1)]


async def test_a_step_that_nobody_watches_sends_nothing_more(
    redis_url: str, fleet: AsyncFleet
) -> None:
    """Two steps and a tool, by Redis's own count of the step's writes."""
    answers = [call(("look", {"what": "a"})), say("It is there.")]
    agent = Agent("looker", model=Script(answers), tools=[look])
    run_id = await fleet.submit(agent, "hi")
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        await client.config_resetstat()
        async with working(redis_url, agent, run_id):
            pass
        used = await client.info("commandstats")
        assert await client.keys("*chunks*") == []
    assert "cmdstat_publish" not in used
    assert used["cmdstat_evalsha"]["calls"] > 0


def start(at: str, attempt: int = 1, step: int = 1) -> dict[str, Any]:
    payload = {"tool_call_id": "c", "tool_name": "t", "step_number": step, "attempt": attempt}
    return {"type": "agent.tool.started", "timestamp": at, "payload": payload}


def ended(at: str, kind: str = "agent.step.completed") -> dict[str, Any]:
    payload = {"step_number": 1, "errors": [], "duration_ms": 1.0, "usage": None}
    return {"type": kind, "timestamp": at, "payload": payload}


def test_a_start_that_comes_after_its_end_or_again_is_left_out() -> None:
    seen = LiveStarts()
    assert seen.add(start("2026-01-01T00:00:01.000Z"))
    assert not seen.add(start("2026-01-01T00:00:01.000Z"))
    assert not seen.covers(ended("2026-01-01T00:00:02.000Z", "agent.step.retried"))
    assert not seen.add(start("2026-01-01T00:00:02.000Z"))
    assert seen.add(start("2026-01-01T00:00:03.000Z", attempt=2))
    assert not seen.covers(ended("2026-01-01T00:00:04.000Z"))
    assert not seen.add(start("2026-01-01T00:00:03.500Z", attempt=2))


def test_a_chat_window_shows_a_tool_from_its_start() -> None:
    window = LiveMessages("run")
    window.add(start("2026-01-01T00:00:01.000Z"))
    (shown,) = window.messages
    assert shown.tool_call_id == "c"
    assert shown.is_status
    window.add({**ended("2026-01-01T00:00:02.000Z"), "sequence": 1})
    assert not window.add(start("2026-01-01T00:00:01.500Z"))
