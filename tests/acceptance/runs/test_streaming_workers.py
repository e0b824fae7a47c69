"""What real workers tell: text over a kill, callbacks in order, events to a webhook over a kill."""

import asyncio
import signal
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
from support.deadlines import until
from support.runs.lapsed_leases import leases_run_out
from support.servers.webhook_receiver import Receiver
from support.workers.busy_runs import NO_LIMITS
from support.workers.fleet_workers import FleetWorker
from support.workers.known_agents import until_known

from stepfleet.orchestrator import AgentRunResult, AsyncFleet, StreamedText
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
QUICK = {"STEPFLEET_LEASE": "2"}
TELLING = str(Path(__file__).parents[1] / "agent_modules" / "telling.py")
WORDS = " ".join(f"word{number}" for number in range(40))


def essence(result: AgentRunResult) -> dict[str, Any]:
    """Return what does not depend on when and where the run was done."""
    steps = [(step.thought, step.usage, step.cost_usd, step.finish_reason) for step in result.steps]
    calls = [
        (one.tool_name, one.arguments, one.result)
        for step in result.steps
        for one in step.tool_calls
    ]
    names = ("output", "stop_reason", "usage", "cost_usd")
    return {**{name: getattr(result, name) for name in names}, "steps": steps, "calls": calls}


async def test_text_that_a_killed_worker_began_starts_anew_and_ends_right(
    redis_url: str, model: ModelServer, start_worker: Callable[..., FleetWorker]
) -> None:
    """STRM-09: the second worker's attempt has the next number, and resets the text."""
    slow = Reply(WORDS, piece=1, pause=0.1)  # half a minute

    def rules(request: RequestRecord) -> Reply:
        return slow if model.count(request.key, 1) <= 1 else Reply(WORDS, piece=5)

    model.follow(rules)
    env = {"STEPFLEET_AGENTS": TELLING}
    first = await asyncio.to_thread(start_worker, name="w1", env=env)
    text, attempts, pieces = StreamedText(), [], {1: "", 2: ""}
    async with AsyncFleet(redis_url) as fleet:
        until_known(redis_url, "typist")
        run_id = await fleet.submit("typist", "type")
        async with asyncio.timeout(90):
            async for event in fleet.runs.events(run_id, chunks=True):
                if text.add(event):
                    attempts.append(event["payload"]["attempt"])
                    pieces[attempts[-1]] += event["payload"]["chunk"]
                    assert text.text == pieces[attempts[-1]]
                    if len(attempts) == 3:
                        first.signal(signal.SIGKILL)
                        await asyncio.to_thread(first.wait)
                        leases_run_out(redis_url)
                        await asyncio.to_thread(start_worker, name="w2", env=env)
        assert (await fleet.runs.result(run_id)).output == WORDS
    assert text.text == WORDS
    assert attempts[:3] == [1, 1, 1]
    assert attempts[-1] == 2
    assert attempts == sorted(attempts)
    assert 0 < len(pieces[1]) < len(pieces[2])


async def test_a_streamed_run_ends_as_any_other_and_its_text_holds_no_arguments(
    redis_url: str, model: ModelServer, start_worker: Callable[..., FleetWorker]
) -> None:
    """STRM-06, STRM-07, STRM-08: on two workers; steps, usage and cost are equal."""

    def rules(request: RequestRecord) -> Reply:
        if request.turn > 1:
            return Reply(WORDS, piece=5)
        calls = (ToolCallReply("look", {"what": "an argument"}),)
        return Reply("Let me look.", tool_calls=calls, piece=3)

    model.follow(rules)
    for name in ("w1", "w2"):
        await asyncio.to_thread(start_worker, name=name, env={"STEPFLEET_AGENTS": TELLING})
    async with AsyncFleet(redis_url) as fleet:
        until_known(redis_url, "looker")
        run_id = await fleet.submit("looker", "hi", broadcast="minimal")
        whole = essence(await fleet.runs.wait(run_id, timeout=LONG))
        run_id = await fleet.submit("looker", "hi", broadcast="standard")
        streamed = essence(await fleet.runs.wait(run_id, timeout=LONG))
        pieces = {1: "", 2: ""}
        async for event in fleet.runs.events(run_id, chunks=True):
            if event["type"] == "agent.stream.chunk":
                pieces[event["payload"]["step_number"]] += event["payload"]["chunk"]
    assert pieces == {1: "Let me look.", 2: WORDS}
    assert [bool(one.body.get("stream")) for one in model.requests] == [False] * 2 + [True] * 2
    assert streamed == whole
    assert (whole["output"], whole["cost_usd"] > 0) == (WORDS, True)


async def test_a_tools_start_is_seen_while_it_runs_also_on_the_worker_after_a_kill(
    redis_url: str, model: ModelServer, start_worker: Callable[..., FleetWorker], tmp_path: Path
) -> None:
    """Once per attempt, numbered; the commit's own event is not a second one."""
    model.script("hi", Reply(tool_calls=(ToolCallReply("search", {"what": "a"}),)), "done")
    go = tmp_path / "go"
    env = {"STEPFLEET_AGENTS": TELLING, "GO": str(go)}
    first = await asyncio.to_thread(start_worker, name="w1", env=env)
    heard: list[dict[str, Any]] = []
    async with AsyncFleet(redis_url) as fleet, asyncio.timeout(90):
        until_known(redis_url, "searcher")
        run_id = await fleet.submit("searcher", "hi")
        async for event in fleet.runs.events(run_id, chunks=True):
            heard.append(event)
            if event["type"] != "agent.tool.started":
                continue
            assert (await fleet.runs.show(run_id)).log == ()
            if event["payload"]["attempt"] == 1:
                first.signal(signal.SIGKILL)
                await asyncio.to_thread(first.wait)
                leases_run_out(redis_url)
                await asyncio.to_thread(start_worker, name="w2", env=env)
            else:
                go.touch()
        assert (await fleet.runs.result(run_id)).output == "done"
    started = [one for one in heard if one["type"] == "agent.tool.started"]
    assert [one["payload"]["attempt"] for one in started] == [1, 2]
    types = [one["type"] for one in heard if "sequence" in one]
    assert types.index("agent.tool.completed") < types.index("agent.step.completed")


async def test_callbacks_are_called_in_order_and_times_are_utc_anywhere(
    redis_url: str, model: ModelServer, start_worker: Callable[..., FleetWorker], tmp_path: Path
) -> None:
    """EVT-17, EVT-18: on a worker whose clock is set to another time zone."""
    model.script("hi", Reply(tool_calls=(ToolCallReply("look", {"what": "a"}),)), "done")
    notes = tmp_path / "notes"
    env = {"STEPFLEET_AGENTS": TELLING, "NOTES": str(notes), "TZ": "Asia/Tokyo"}
    await asyncio.to_thread(start_worker, env=env)
    before = datetime.now(UTC) - timedelta(seconds=1)
    async with AsyncFleet(redis_url) as fleet:
        until_known(redis_url, "noted")
        run_id = await fleet.submit("noted", "hi")
        events = [event async for event in fleet.runs.events(run_id, follow=True)]
    stamps = [event["timestamp"] for event in events]
    assert {(len(one), one[-1:]) for one in stamps} == {(24, "Z")}
    late = datetime.now(UTC) + timedelta(seconds=1)
    assert all(before < datetime.fromisoformat(one) < late for one in stamps)

    async def all_noted() -> bool:
        return notes.exists() and "agent_finish" in notes.read_text()

    await until(all_noted, within=LONG)
    told = [line.rsplit(" ", 1) for line in notes.read_text().splitlines()]
    assert [note for note, _ in told] == [
        *("step_start 1 AgentState", "llm_response 1 LLMResponse", "step_end 1 StepResult"),
        *("step_start 2 AgentState", "llm_response 2 LLMResponse", "step_end 2 StepResult"),
        "agent_finish 2 AgentState",
    ]
    assert {zone for _, zone in told} == {"+0900"}


async def test_a_webhook_gets_every_event_though_workers_are_killed(
    redis_url: str, model: ModelServer, start_worker: Callable[..., FleetWorker]
) -> None:
    """EVT-19, EVT-20: without repetitions the sequence of each run has no gap."""
    killed = threading.Event()

    def rules(request: RequestRecord) -> Reply:
        latency = 0.1 if killed.is_set() else 1.0
        if request.turn > 3 and killed.is_set():
            return Reply("done", latency=latency)
        calls = (ToolCallReply("look", {"what": str(request.turn)}),)
        return Reply(tool_calls=calls, latency=latency)

    model.follow(rules)
    async with Receiver("secret") as receiver, AsyncFleet(redis_url) as fleet:
        env = {
            "STEPFLEET_WEBHOOKS": orjson.dumps([receiver.url]).decode(),
            "STEPFLEET_WEBHOOK_SECRET": "secret",
        }
        victims = {**env, **QUICK}
        workers = [
            await asyncio.to_thread(start_worker, name=f"w{number}", env=victims)
            for number in range(2)
        ]
        until_known(redis_url, "strict")
        run_ids = [
            await fleet.submit("strict", f"question {number}", **NO_LIMITS) for number in range(20)
        ]

        async def some_came() -> bool:
            return len(receiver.taken) > 20

        await until(some_came, within=LONG)
        for number, worker in enumerate(workers):
            worker.signal(signal.SIGKILL)
            await asyncio.to_thread(worker.wait)
            if number:
                assert (await fleet.overview()).active == len(run_ids)
                killed.set()
            await asyncio.to_thread(start_worker, name=f"w{number + 2}", env=env)
        for run_id in run_ids:
            await fleet.runs.wait(run_id, timeout=60)
        expected: dict[str, list[dict[str, Any]]] = {
            run_id: [event async for event in fleet.runs.events(run_id, follow=True)]
            for run_id in run_ids
        }

        async def all_came() -> bool:
            return all(receiver.of(run_id) == events for run_id, events in expected.items())

        await until(all_came, within=60, what="every event")
    for run_id in run_ids:
        numbers = [event["sequence"] for event in receiver.of(run_id)]
        assert numbers == list(range(1, len(numbers) + 1))
