"""Followers of a run: late, coming back, in plain code, by events, steps and chunks of text."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import orjson
from redis.asyncio import Redis
from support.deadlines import until
from support.runs.scripted_steps import USAGE, Script, call, say
from support.runs.tools import look

from stepfleet.orchestrator import (
    LLM,
    Agent,
    AsyncFleet,
    Fleet,
    LLMResponse,
    ModelRequest,
    StepResult,
    StoreError,
    StreamedText,
)
from stepfleet.orchestrator.client.watching.follow import RunFollower
from stepfleet.orchestrator.client.watching.watch import Position, RunWatch
from stepfleet.orchestrator.events.envelope import Event, channel_of
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.codec import pairs
from stepfleet.worker.events.text_chunks import ChunkSender, LiveStep
from stepfleet.worker.runtime.inline import InlineWorker


class Typist(LLM):
    """Types its answer in pieces; the pieces of the next answer may be held back."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces
        self.hold_after: int | None = None
        self.typed = asyncio.Event()
        self.go_on = asyncio.Event()

    async def generate(self, request: ModelRequest) -> LLMResponse:
        return LLMResponse(content="".join(self.pieces), usage=USAGE)

    async def generate_streaming(
        self, request: ModelRequest, on_text: Callable[[str], None]
    ) -> LLMResponse:
        for number, piece in enumerate(self.pieces):
            if number == self.hold_after:
                self.typed.set()
                await self.go_on.wait()
            on_text(piece)
        return await self.generate(request)


def looker() -> Agent:
    answers = [call(("look", {"what": "a"}), text="Looking."), say("It is there.")]
    return Agent("looker", model=Script(answers), tools=[look])


async def finished(redis_url: str, agent: Agent, *run_ids: str) -> None:
    async with InlineWorker(load_settings(redis_url=redis_url), [agent]) as worker:
        await worker.finish(*run_ids)


async def test_who_comes_late_or_comes_back_misses_nothing(
    redis_url: str, fleet: AsyncFleet
) -> None:
    """EVT-21, STRM-02: from the first event, and from the one where it had stopped."""
    agent = looker()
    run_id = await fleet.submit(agent, "hi")
    await finished(redis_url, agent, run_id)
    late = [event async for event in fleet.runs.events(run_id, follow=True)]
    assert [one["sequence"] for one in late] == list(range(1, len(late) + 1))
    assert late[-1]["payload"]["status"] == "completed"
    back = [event async for event in fleet.runs.events(run_id, follow=True, since=4)]
    assert back == late[4:]
    assert len({one["event_id"] for one in late}) == len(late)


async def test_plain_code_follows_the_same_events_and_steps(redis_url: str) -> None:
    """STRM-02"""
    agent = looker()
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(agent, "hi")
        await finished(redis_url, agent, run_id)
        expected = [event async for event in fleet.runs.events(run_id, follow=True)]

    def read() -> tuple[list[Any], list[StepResult]]:
        with Fleet(redis_url) as plain:
            return list(plain.runs.events(run_id, follow=True)), list(plain.runs.steps(run_id))

    events, steps = await asyncio.to_thread(read)
    assert events == expected
    assert [step.step for step in steps] == [1, 2]


async def test_a_run_is_consumed_step_by_step(redis_url: str, fleet: AsyncFleet) -> None:
    """STRM-02, STRM-03: the first step comes while the second is not made; equal to the stored."""
    gate = asyncio.Event()

    async def second(_: ModelRequest) -> LLMResponse:
        await gate.wait()
        return say("It is there.")

    agent = Agent("looker", model=Script([call(("look", {"what": "a"})), second]), tools=[look])
    run_id = "6f9619ff-8b86-d011-b42d-00cf4fc964ff"
    steps = fleet.run_stream(agent, "hi", run_id=run_id)
    first_step = asyncio.create_task(anext(steps))

    async def submitted() -> bool:
        return (await fleet.overview()).active > 0

    await until(submitted, within=30)
    working = asyncio.create_task(finished(redis_url, agent, run_id))
    first = await asyncio.wait_for(first_step, 30)
    gate.set()
    async with asyncio.timeout(30):
        rest = [step async for step in steps]
        await working
    assert all(isinstance(step, StepResult) for step in (first, *rest))
    stored = (await fleet.runs.result(run_id)).steps
    assert (first, *rest) == stored
    assert len(stored) == 2


async def test_text_is_reported_in_chunks_while_it_is_written(
    redis_url: str, fleet: AsyncFleet
) -> None:
    """EVT-11, STRM-04, STRM-05: the first part is read while the model still writes."""
    typist = Typist("Hel", "lo, ", "", "wor", "ld")
    typist.hold_after = 2
    agent = Agent("typist", model=typist, broadcast="standard")
    run_id = await fleet.submit(agent, "hi")
    working = asyncio.create_task(finished(redis_url, agent, run_id))
    text, chunks = StreamedText(), []
    kinds: list[str] = []
    async with asyncio.timeout(30):
        async for event in fleet.runs.events(run_id, chunks=True):
            kinds.append(event["type"])
            text.add(event)
            if event["type"] == "agent.stream.chunk":
                chunks.append(event["payload"])
            if text.text == "Hello, " and not typist.go_on.is_set():
                assert (await fleet.runs.show(run_id)).log == ()
                typist.go_on.set()
        await working
    assert kinds[-1] == "agent.status"  # the last text is written after the commit, but read before
    assert text.text == "".join(one["chunk"] for one in chunks) == "Hello, world"
    assert [one["chunk_index"] for one in chunks] == list(range(len(chunks)))
    assert [one["is_complete"] for one in chunks] == [False] * (len(chunks) - 1) + [True]
    assert sum(one["tokens_delta"] for one in chunks) == 4
    assert {one["attempt"] for one in chunks} == {1}
    again = StreamedText()
    async for event in fleet.runs.events(run_id, chunks=True):
        again.add(event)
    assert again.text == "Hello, world"


class BehindTheRun(RunWatch):
    """Says once that an ended run goes on, as one does that looked just before the end."""

    def __init__(self, watch: RunWatch, then: Callable[[], Awaitable[object]]) -> None:
        self._watch = watch
        self._then = then

    async def moved(
        self, run_id: str, seen: Position | None = None, *, chunks: bool = False
    ) -> Position:
        position = await self._watch.moved(run_id, None, chunks=chunks)
        if seen is None:
            return replace(position, status=Lifecycle.IN_PROGRESS)
        await self._then()
        return position


async def test_the_end_comes_behind_the_text_for_one_who_looked_just_before_it(
    redis_url: str, fleet: AsyncFleet
) -> None:
    """EVT-21: the last text arrives behind the commit, and the end has been read already."""
    agent = Agent("typist", model=Typist("Hello"), broadcast="standard")
    run_id = await fleet.submit(agent, "hi")
    await finished(redis_url, agent, run_id)
    client = await fleet._session.open()
    execute, key = client.store.connection.execute, f"{client.store.keys.run(run_id)}:chunks"
    [[entry, fields]] = await execute("XREVRANGE", key, "+", "-", "COUNT", 1)
    await execute("XDEL", key, entry)
    watch = BehindTheRun(
        client.watch, lambda: execute("XADD", key, "*", "chunk", pairs(fields)["chunk"])
    )
    following = RunFollower(client.store, watch)
    seen = [one async for one in following.envelopes(run_id, 0, chunks=True)]
    assert [one["type"] for one in seen][-2:] == ["agent.stream.chunk", "agent.status"]


async def test_chunks_are_numbered_anew_in_each_execution(
    redis_url: str, fleet: AsyncFleet
) -> None:
    """EVT-11: from 0, so that a client knows which text a chunk continues."""
    agent = Agent("typist", model=Typist("Hello"), broadcast="standard")
    run_id = await fleet.submit(agent, "hi")
    await finished(redis_url, agent, run_id)
    await fleet.runs.send(run_id, "again")
    await finished(redis_url, agent, run_id)
    first: dict[str, list[int]] = {}
    async for event in fleet.runs.events(run_id, chunks=True):
        if event["type"] == "agent.stream.chunk":
            assert event["payload"]["chunk"] or event["payload"]["is_complete"]
            numbers = first.setdefault(event["execution_id"], [])
            assert event["payload"]["chunk_index"] == len(numbers)
            numbers.append(len(numbers))
    assert list(first) == [f"{run_id}:1", f"{run_id}:2"]


async def test_a_run_that_does_not_ask_for_text_tells_none(
    redis_url: str, fleet: AsyncFleet
) -> None:
    """EVT-11: nothing is written for it."""
    agent = Agent("typist", model=Typist("Hello"))
    run_id = await fleet.submit(agent, "hi")
    await finished(redis_url, agent, run_id)
    assert "agent.stream.chunk" not in {
        one["type"] async for one in fleet.runs.events(run_id, chunks=True)
    }
    async with Redis.from_url(redis_url) as client:
        assert await client.keys("*chunks*") == []


async def test_one_run_may_ask_for_its_text(redis_url: str, fleet: AsyncFleet) -> None:
    """EVT-23: the configuration of one run, by its overrides."""
    agent = Agent("typist", model=Typist("Hello"))
    run_id = await fleet.submit(agent, "hi", broadcast="standard")
    await finished(redis_url, agent, run_id)
    types = {one["type"] async for one in fleet.runs.events(run_id, chunks=True)}
    assert "agent.stream.chunk" in types


async def test_a_full_run_emits_all_seven_types(redis_url: str, fleet: AsyncFleet) -> None:
    """EVT-04"""
    agent = looker()
    run_id = await fleet.submit(agent, "hi", broadcast="debug")
    await finished(redis_url, agent, run_id)
    assert {one["type"] async for one in fleet.runs.events(run_id, chunks=True)} == {
        *("agent.status", "agent.step.started", "agent.step.completed"),
        *("agent.tool.started", "agent.tool.completed"),
        *("agent.stream.chunk", "agent.continuation"),
    }


async def test_chunks_are_published_on_the_sessions_channel(
    redis_url: str, fleet: AsyncFleet
) -> None:
    """EVT-03, STRM-05"""
    agent = Agent("typist", model=Typist("Hello"), broadcast="standard")
    run_id = await fleet.submit(agent, "hi")
    async with Redis.from_url(redis_url) as client, client.pubsub() as channel:
        await channel.subscribe(channel_of(run_id))
        await finished(redis_url, agent, run_id)
        heard: list[dict[str, Any]] = []

        async def complete() -> bool:
            message = await channel.get_message(ignore_subscribe_messages=True)
            if message:
                heard.append(orjson.loads(message["data"]))
            return bool(heard) and heard[-1]["payload"].get("is_complete", False)

        await until(complete, within=30)
    assert "".join(one["payload"].get("chunk", "") for one in heard) == "Hello"
    assert {one["type"] for one in heard[1:]} == {"agent.stream.chunk"}
    assert heard[0]["type"] == "agent.step.started"


@asynccontextmanager
async def blocked_subscriber(redis_url: str, run_ids: list[str]) -> AsyncIterator[str]:
    """Yield the address of a connection that subscribes to runs' text and reads none of it."""
    url = urlsplit(redis_url)
    with socket.socket() as subscriber:
        subscriber.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        subscriber.connect((url.hostname, url.port))
        channels = " ".join(channel_of(run_id) for run_id in run_ids)
        subscriber.sendall(f"SUBSCRIBE {channels}\r\n".encode())
        host, port = subscriber.getsockname()
        yield f"{host}:{port}"


async def test_a_subscriber_that_does_not_read_slows_no_worker(
    redis_url: str, fleet: AsyncFleet
) -> None:
    """STRM-10: what it does not take piles up at Redis while runs go on to their end."""
    agent = Agent("typist", model=Typist(*["long text " * 2000] * 20), broadcast="standard")
    run_ids = [await fleet.submit(agent, "hi") for _ in range(12)]
    async with (
        Redis.from_url(redis_url, decode_responses=True) as client,
        blocked_subscriber(redis_url, run_ids) as address,
    ):

        async def all_subscribed() -> bool:
            return len(await client.pubsub_channels()) == len(run_ids)

        await until(all_subscribed, within=60, what="the subscriptions")
        async with asyncio.timeout(60):
            await finished(redis_url, agent, *run_ids)
        (waiting,) = [
            int(one["omem"]) for one in await client.client_list() if one["addr"] == address
        ]
    assert waiting > 0
    for run_id in run_ids:
        assert (await fleet.runs.result(run_id)).success


class Away:
    """Stands for a Redis that is away at first: the sender's other side is not Redis itself."""

    def __init__(self) -> None:
        self.sent: list[Event] = []
        self.is_away = True

    async def begin(self, run_id: str, step: int, *, anew: bool = True) -> int:
        return 1

    async def add(self, chunks: Any) -> None:
        if self.is_away:
            raise StoreError("away")
        self.sent += chunks


async def test_text_that_cannot_be_told_is_kept_for_the_next_chunk(
    redis_url: str, fleet: AsyncFleet
) -> None:
    """EVT-20: nothing is raised into the call, and nothing waits for the store."""
    agent = Agent("typist", model=Typist("Hello"))
    run_id = await fleet.submit(agent, "hi")
    async with InlineWorker(load_settings(redis_url=redis_url), [agent]) as worker:
        claim = await worker._worker.ports.store.claim(Work(run_id, 0), "t")
    store = Away()
    sender = ChunkSender(store, noon)
    writing = sender.begin(LiveStep.of(claim))  # type: ignore[arg-type]
    writing.add("Hel")
    await sender.settle(30)
    assert (sender.failures, store.sent) == (1, [])
    store.is_away = False
    writing.add("lo")
    writing.complete()
    await sender.settle(30)
    assert [(one.payload["chunk"], one.payload["chunk_index"]) for one in store.sent] == [
        ("Hello", 0)
    ]


async def noon() -> datetime:
    return datetime(2026, 1, 2, 12, tzinfo=UTC)


async def test_the_command_prints_text_and_events_behind_a_number(
    redis_url: str, fleet: AsyncFleet
) -> None:
    """EVT-21, STRM-05: `stepfleet events RUN --follow --chunks --since N`."""
    agent = Agent("typist", model=Typist("Hel", "lo"), broadcast="standard")
    run_id = await fleet.submit(agent, "hi")
    await finished(redis_url, agent, run_id)

    def ask(*options: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "stepfleet.orchestrator.cli", "events", run_id, *options]
        env = {**os.environ, "STEPFLEET_REDIS_URL": redis_url}
        done = subprocess.run(command, env=env, capture_output=True, check=True, timeout=60)
        return [orjson.loads(line) for line in done.stdout.splitlines()]

    everything = await asyncio.to_thread(ask, "--follow", "--chunks")
    text = StreamedText()
    for event in everything:
        text.add(event)
    assert text.text == "Hello"
    assert [one["sequence"] for one in await asyncio.to_thread(ask, "--since", "3")] == [4, 5]
