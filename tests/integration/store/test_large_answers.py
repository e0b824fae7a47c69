"""Answers of a size that a model chose: what a step takes of them, and what they cost the loop."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import orjson
import pytest
from support.runs.opened_runs import opened_run
from support.runs.scripted_steps import call, say
from support.servers.raw_model_server import RawModelServer, completion, completion_body, raw

from stepfleet.orchestrator import (
    ErrorPolicy,
    LLMResponse,
    Message,
    ModelRequest,
    ModelSettings,
    UsageStats,
    tool,
)
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.verdict import Verdict
from stepfleet.orchestrator.store.runs.steps import StepStore
from stepfleet.orchestrator.tools.calls import MOST_CALLS
from stepfleet.worker.models import Models
from stepfleet.worker.models.bodies import read_json
from stepfleet.worker.models.openai.chat import parse_completion

ASKED = 3 * MOST_CALLS
RUNS: list[int] = []


@tool
def look(at: int) -> int:
    """Look something up."""
    RUNS.append(at)
    return at


async def test_a_step_executes_so_many_calls_and_tells_the_model_of_the_others(
    redis_url: str,
) -> None:
    RUNS.clear()
    asked = call(*(("look", {"at": at}) for at in range(ASKED)))
    policy = ErrorPolicy.ignore_tool_errors()
    answers = (asked, say("done"))
    async with opened_run(redis_url, *answers, tools=(look,), error_policy=policy) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert sorted(RUNS) == list(range(MOST_CALLS))
    assert stored.result().output == "done"
    asking, *answered = [one for one in stored.state.messages if one.role in ("assistant", "tool")]
    told = [one for one in answered if one.role == "tool"]
    assert [one.tool_call_id for one in told] == [one.id for one in asking.tool_calls or ()]
    assert len(told) == MOST_CALLS + 1
    assert f"more than {MOST_CALLS} tool calls" in told[-1].text


async def test_reading_a_large_answer_leaves_the_loop_to_others() -> None:
    """What takes seconds to read is read beside the loop, whose longest rest is a part of that."""
    arguments = "[" + "1," * 240_000 + "1]"
    calls = [
        {"id": f"c{at}", "function": {"name": "look", "arguments": '{"a":' + arguments + "}"}}
        for at in range(6)
    ]
    began = time.perf_counter()
    parse_completion(completion_body(None, tool_calls=calls), "asked")
    alone = time.perf_counter() - began
    models = Models(environment={"OPENAI_API_KEY": "test"})
    rests = [0.0]

    async def watch() -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            rests.append(now - before)
            before = now

    async with RawModelServer().running() as server:
        server.answers(completion(None, tool_calls=calls))
        request = ModelRequest(
            model="openai:gpt-4o-mini",
            messages=(Message.user("hi"),),
            settings=ModelSettings(base_url=server.base_url),
        )
        await models.generate(request)  # connected, and all is imported
        watching = asyncio.create_task(watch())
        answer = await models.generate(request)
        watching.cancel()
    await models.aclose()
    assert len(answer.tool_calls or ()) == len(calls)
    assert max(rests) < alone / 2


async def test_a_large_event_of_a_stream_is_read_beside_the_loop() -> None:
    """CPU time of the loop's own thread is measured: other load does not add to it."""
    mended = orjson.dumps({"said": ["x", *[[[]]] * 600_000]}).replace(b"x", b"\x01", 2)
    begun = time.thread_time()
    read_json(mended)
    alone = time.thread_time() - begun
    models = Models(environment={"OPENAI_API_KEY": "test"})
    end = {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    stream = head + b"data: " + mended + b"\n\ndata: " + orjson.dumps(end) + b"\n\n"
    async with RawModelServer().running() as server:
        server.answers(raw(stream))
        request = ModelRequest(
            model="openai:gpt-4o-mini",
            messages=(Message.user("hi"),),
            settings=ModelSettings(base_url=server.base_url, stream=True),
        )
        await models.generate(request)  # connected, and all is imported
        begun = time.thread_time()
        answer = await models.generate(request)
        spent = time.thread_time() - begun
    await models.aclose()
    assert answer.content == "hi"
    assert spent < alone / 2


async def test_usage_that_cannot_be_neither_ends_a_run_nor_spoils_its_batch(redis_url: str) -> None:
    usage = UsageStats(prompt_tokens=2**63 - 1, completion_tokens=-5, total_tokens=2**64)
    asked = call(("look", {"at": 1})).model_copy(update={"usage": usage})
    done = say("done").model_copy(update={"usage": usage})
    async with opened_run(redis_url, asked, done, tools=(look,)) as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
        counters = await desk.counters()
    assert stored.result().output == "done"
    assert counters["steps"] == 2
    assert counters.get("tokens", 0) == 0
    assert counters.get("cost", 0) >= 0


@pytest.mark.parametrize("levels", [150, 220, 300, 2_000])
async def test_a_run_whose_model_reasons_in_nested_data_is_paid_once_and_can_be_read(
    redis_url: str, levels: int
) -> None:
    data: object = "because"
    for _ in range(levels):
        data = [data]
    asked = 0

    async def answer(request: ModelRequest) -> LLMResponse:
        nonlocal asked
        asked += 1
        done = say("done", reasoning=({"reasoning": {"provider": "x", "at": 0, "data": data}},))
        return done.model_copy(update={"model": "m" * 1_000_000, "request_id": "r" * 1_000_000})

    async with opened_run(redis_url, answer) as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
        size = await desk.opened.connection.execute(
            "MEMORY", "USAGE", f"{desk.opened.keys.run(run_id)}:log"
        )
    assert (asked, stored.result().output) == (1, "done")
    assert size < 20_000


async def test_what_a_commit_cannot_write_fails_its_step_and_not_its_run(redis_url: str) -> None:
    """Nothing is written of it, and no worker is lost over it."""
    failed: list[Verdict] = []

    class Strict(StepStore):
        async def commit(self, claim: Claim, verdict: Verdict, *given: Any, **more: Any) -> Any:
            """Have the first verdict hold text that is no Unicode."""
            if verdict.logged and not failed:
                failed.append(verdict)
                result = verdict.logged.result.model_copy(update={"thought": "half \ud83d"})
                logged = verdict.logged.model_copy(update={"result": result})
                verdict = replace(verdict, logged=logged)
            return await super().commit(claim, verdict, *given, **more)

    async with opened_run(redis_url, say("first")) as (desk, hands, run_id):
        strict = Strict.__new__(Strict)
        strict.__dict__.update(desk.steps.__dict__)
        hands.desk = replace(desk, steps=strict)
        await hands.step(run_id, 0)
        stored = await desk.stored(run_id)
        crashes = (await desk.header(run_id)).get("crashes", "0")
    (error,) = stored.log[0].result.errors
    assert error.code == "SERIALIZATION_ERROR"
    assert "cannot be stored" in error.message
    assert (len(failed), crashes) == (1, "0")
