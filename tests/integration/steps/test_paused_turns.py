"""A turn that its provider pauses among tools of its own: the run makes another step with it."""

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from support.runs.scripted_steps import Hands
from support.runs.stored_runs import bench
from support.runs.tools import look
from support.servers.raw_model_server import (
    RawModelServer,
    Script,
    completion_body,
    raw,
    reply,
)

from stepfleet.orchestrator import Agent, FinishReason, RunStatus
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.steps import StepType

SEARCH = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"q": "é"}}
FOUND = {
    "type": "web_search_tool_result",
    "tool_use_id": "srvtoolu_1",
    "content": [{"type": "web_search_result", "url": "https://x.test", "encrypted_content": "zz"}],
}
HALF: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
    SEARCH,
    FOUND,
]
CITED: dict[str, Any] = {"type": "text", "text": "So far", "citations": [{"url": "https://x.test"}]}


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RawModelServer]:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    async with RawModelServer().running() as running:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", running.base_url)
        yield running


def message(content: list[dict[str, Any]], reason: str) -> dict[str, Any]:
    usage = {"input_tokens": 10, "output_tokens": 5}
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x"}
    return {**head, "content": content, "stop_reason": reason, "usage": usage}


def whole(content: list[dict[str, Any]], reason: str) -> Script:
    return reply(200, message(content, reason))


def streamed(content: list[dict[str, Any]], reason: str) -> Script:
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**message([], reason), "stop_reason": None}}
    ]
    for index, block in enumerate(content):
        begun, deltas = dict(block), []
        match block["type"]:
            case "server_tool_use":
                begun["input"] = {}
                text = orjson.dumps(block["input"]).decode()
                deltas = [
                    {"type": "input_json_delta", "partial_json": text[:4]},
                    {"type": "input_json_delta", "partial_json": text[4:]},
                ]
            case "thinking":
                begun |= {"thinking": "", "signature": ""}
                deltas = [
                    {"type": "thinking_delta", "thinking": block["thinking"]},
                    {"type": "signature_delta", "signature": block["signature"]},
                ]
            case "text":
                begun = {"type": "text", "text": ""}
                deltas = [{"type": "text_delta", "text": block["text"]}]
                for one in block.get("citations", ()):
                    deltas.append({"type": "citations_delta", "citation": one})
        events.append({"type": "content_block_start", "index": index, "content_block": begun})
        events += [{"type": "content_block_delta", "index": index, "delta": one} for one in deltas]
        events.append({"type": "content_block_stop", "index": index})
    events.append({"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {}})
    events.append({"type": "message_stop"})
    lines = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    return raw(head + lines)


@pytest.mark.parametrize("form", [whole, streamed])
@pytest.mark.parametrize("half", [HALF, [*HALF, CITED], [CITED, SEARCH, FOUND]])
async def test_a_paused_turn_goes_back_unchanged_and_is_continued(
    redis_url: str, server: RawModelServer, form: Any, half: list[dict[str, Any]]
) -> None:
    server.answers(form(half, "pause_turn"), form([{"type": "text", "text": "Done."}], "end_turn"))
    settings = {"stream": form is streamed}
    agent = Agent("seeker", model="anthropic:claude-x", settings=settings)
    async with bench(redis_url, agent, lease=600, grace=60) as desk:
        hands = Hands(desk, agent)
        run_id = await desk.create()
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
        await hands.models.aclose()
    assert (result.output, result.status) == ("Done.", RunStatus.COMPLETED)
    assert [step.finish_reason for step in result.steps] == [FinishReason.PAUSE, FinishReason.STOP]
    assert [step.type for step in result.steps] == [
        StepType.TOOL_EXECUTION,
        StepType.FINAL_RESPONSE,
    ]
    first, second = (one.body["messages"] for one in server.received)
    assert second[len(first) :] == [{"role": "assistant", "content": half}]


async def test_a_turn_that_is_paused_again_and_again_ends_at_the_limit_of_steps(
    redis_url: str, server: RawModelServer
) -> None:
    server.answers(whole(HALF, "pause_turn"))
    agent = Agent("seeker", model="anthropic:claude-x", max_steps=3)
    async with bench(redis_url, agent, lease=600, grace=60) as desk:
        hands = Hands(desk, agent)
        run_id = await desk.create()
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
        await hands.models.aclose()
    assert (result.stop_reason, len(result.steps)) == (StopReason.STEPS_LIMIT, 3)
    content = server.received[-1].body["messages"][-1]["content"]
    assert content == [*HALF, *HALF]


async def test_half_a_turn_is_no_answer_that_a_contract_judges(
    redis_url: str, server: RawModelServer
) -> None:
    answer = {
        "type": "tool_use",
        "id": "toolu_1",
        "name": "structured_response",
        "input": {"structured": {"n": 4}},
    }
    server.answers(whole([*HALF, CITED], "pause_turn"), whole([answer], "tool_use"))
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    agent = Agent("seeker", model="anthropic:claude-x", output_schema=schema)
    async with bench(redis_url, agent, lease=600, grace=60) as desk:
        hands = Hands(desk, agent)
        run_id = await desk.create()
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
        await hands.models.aclose()
    assert result.structured == {"n": 4}
    assert len(server.received) == 2
    assert server.received[1].body["messages"][-1]["role"] == "assistant"  # and no reminder


async def test_the_turn_that_goes_on_with_a_paused_one_goes_back_whole_too(
    redis_url: str, server: RawModelServer
) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"what": "a"}}
    done = [{"type": "text", "text": "Done."}]
    server.answers(
        whole([SEARCH], "pause_turn"),
        whole([FOUND, CITED, call], "tool_use"),
        whole(done, "end_turn"),
    )
    agent = Agent("seeker", model="anthropic:claude-x", tools=(look,))
    async with bench(redis_url, agent, lease=600, grace=60) as desk:
        hands = Hands(desk, agent)
        run_id = await desk.create()
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
        await hands.models.aclose()
    assert result.output == "Done."
    turns = server.received[-1].body["messages"]
    assert turns[-2] == {"role": "assistant", "content": [SEARCH, FOUND, CITED, call]}
    (answered,) = turns[-1]["content"]
    assert (answered["type"], answered["tool_use_id"]) == ("tool_result", "toolu_1")


async def test_no_other_provider_gets_half_a_turn(
    redis_url: str, server: RawModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    server.answers(whole([CITED, SEARCH], "pause_turn"), reply(529, overloaded))
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    async with RawModelServer().running() as other:
        monkeypatch.setenv("OPENAI_BASE_URL", other.base_url)
        other.answers(reply(200, completion_body("Done.")))
        agent = Agent("seeker", model="anthropic:claude-x", fallbacks=("openai:m",))
        async with bench(redis_url, agent, lease=600, grace=60) as desk:
            hands = Hands(desk, agent)
            run_id = await desk.create()
            await hands.finish(run_id)
            result = (await desk.stored(run_id)).result()
            await hands.models.aclose()
        assert result.output == "Done."
        asked = other.received[-1].body["messages"]
    assert asked[-1]["role"] == "user"
    assert not any(one["role"] == "assistant" for one in asked)
