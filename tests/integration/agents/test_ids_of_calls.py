"""Ids of calls over whole runs: unique inside, and under which ids services get them."""

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from support.runs.scripted_steps import Hands
from support.runs.stored_runs import bench

from stepfleet.orchestrator import Agent, tool
from stepfleet.orchestrator.models.services import environment_of
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.worker.testing.scenario import Fault, FaultKind, Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

PROVIDERS = (
    "openai",
    "compatible",
    "openai-responses",
    "anthropic",
    "google",
    "bedrock",
    "mistral",
)


@tool(idempotent=True)
async def look(what: str) -> str:
    """Look."""
    return f"seen {what}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    with ModelServer() as running:
        for name, value in environment_of(running.url.removesuffix("/v1")).items():
            monkeypatch.setenv(name, value)
        yield running


def asks(*whats: str, name: str = "call_0") -> Reply:
    """Return an answer whose calls all have the same id."""
    return Reply(tool_calls=tuple(ToolCallReply("look", {"what": one}, id=name) for one in whats))


async def played(redis_url: str, agent: Agent) -> tuple[tuple[ToolCallRecord, ...], str]:
    async with bench(redis_url, agent) as desk:
        run_id = await desk.create()
        hands = Hands(desk, agent)
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
        await hands.models.aclose()
    result = stored.result()
    assert result.error is None
    said = {one.tool_call_id: one.text for one in stored.state.messages if one.is_tool()}
    calls = tuple(call for step in result.steps for call in step.tool_calls)
    assert said == {call.call_id: f"seen {call.arguments['what']}" for call in calls}
    return calls, result.output or ""


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_service_that_numbers_the_calls_of_each_answer_alike_loses_no_run(
    redis_url: str, server: ModelServer, provider: str
) -> None:
    server.follow({"hello": (asks("a"), asks("b", "c"), asks("d"), Reply("Done."))})
    agent = Agent("looker", model=f"{provider}:m", tools=[look])
    calls, output = await played(redis_url, agent)
    assert (server.violations, output) == ((), "Done.")
    assert [call.arguments["what"] for call in calls] == ["a", "b", "c", "d"]
    assert len({call.call_id for call in calls}) == 4
    assert calls[0].call_id == "call_0"


@pytest.mark.parametrize(
    ("second", "form"),
    [
        ("mistral:m", "[A-Za-z0-9]{9}"),
        ("openai:m", "[!-~]{1,40}"),
        ("openai-responses:m", "[!-~]{1,64}"),
        ("bedrock:m", "[A-Za-z0-9_-]{1,64}"),
    ],
)
async def test_the_ids_of_the_first_model_fit_the_one_that_stands_in_for_it(
    redis_url: str, server: ModelServer, second: str, form: str
) -> None:
    long = "functions.look:" + "0" * 80
    server.follow({"hello": (asks("a", "b", name=long), Reply("Done."))})
    server.fail(Fault(FaultKind.RESET_MID_BODY), turn=2, attempt=1)
    agent = Agent("looker", model=["vllm:m", second], tools=[look])
    calls, output = await played(redis_url, agent)
    assert (server.violations, output) == ((), "Done.")
    assert calls[0].call_id == long
    sent = [call["id"] for call in server.requests[-1].body["messages"][1]["tool_calls"]]
    assert len(set(sent)) == 2
    assert all(re.fullmatch(form, one) for one in sent)


async def test_what_a_service_got_once_it_gets_again_in_every_later_request(
    redis_url: str, server: ModelServer
) -> None:
    """A prompt cache holds the beginning of a conversation."""
    turns = [asks(str(number), name="call.0") for number in range(4)]
    server.follow({"hello": (*turns, Reply("Done."))})
    await played(redis_url, Agent("looker", model="mistral:m", tools=[look]))
    said = [one.body["messages"] for one in server.requests]
    for earlier, later in pairwise(said):
        assert later[: len(earlier)] == earlier
