"""Answers of a size that a model chose: what a step takes of them, and what they cost the loop."""

import asyncio
import time

import orjson
from support.runs.opened_runs import opened_run
from support.runs.scripted_steps import call, say
from support.servers.raw_model_server import RawModelServer, completion, completion_body, raw

from stepfleet.orchestrator import (
    ErrorPolicy,
    Message,
    ModelRequest,
    ModelSettings,
    UsageStats,
    tool,
)
from stepfleet.orchestrator.tools.calls import MOST_CALLS
from stepfleet.worker.models import Models
from stepfleet.worker.models.lenient_json import read_json
from stepfleet.worker.models.openai.answer import parse_completion

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
    mended = orjson.dumps({"said": ["x"] * 300_000}).replace(b"x", b"\x01")
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
