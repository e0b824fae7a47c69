"""The conversation as Redis keeps it, behind whole steps and a model behind real HTTP."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import ValidationError
from support.runs.opened_runs import opened_run
from support.runs.scripted_steps import Hands, Script, call, say
from support.runs.stored_runs import bench
from support.runs.tools import broken, look
from support.servers.raw_model_server import RawModelServer, completion

from stepfleet.orchestrator import (
    Agent,
    AsyncFleet,
    ErrorPolicy,
    Message,
    ModelRequest,
    ModelSettings,
    Role,
    tool,
)
from stepfleet.orchestrator.protocol.revision import further_turn
from stepfleet.orchestrator.records.conversation.blocks import from_blocks, to_blocks
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.models import Models
from stepfleet.worker.models.connections import Connections
from stepfleet.worker.models.http_model import HttpModel
from stepfleet.worker.models.providers import service_model
from stepfleet.worker.runtime.inline import InlineWorker


@pytest.fixture
async def server() -> AsyncIterator[RawModelServer]:
    async with RawModelServer().running() as running:
        yield running


@pytest.fixture
async def openai() -> AsyncIterator[HttpModel]:
    connections = Connections()
    yield service_model("openai", connections, environment={})
    await connections.aclose()


def wire_call(arguments: str, **fields: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function, **fields}


async def test_every_role_is_read_back_from_redis_and_can_not_be_changed(redis_url: str) -> None:
    """MSG-01, MSG-02, MSG-03, MSG-04, MSG-05: truth table over a run's stored conversation."""
    script = (call(("look", {"what": "a"})), say("seen"), say("again"))
    async with opened_run(redis_url, *script, tools=(look,), instructions="Be brief.") as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        before = await desk.stored(run_id)
        turn = further_turn(before.state, before.log, {}, await desk.runs.now())
        told = Message(role=Role.DEVELOPER, content="Use no tools.")
        await desk.control.retry(before, turn, (told,))
        await hands.finish(run_id)
        messages = {one.role: one for one in (await desk.stored(run_id)).state.messages}
    tests = ("is_user", "is_assistant", "is_tool", "is_developer", "is_system")
    assert {
        role: tuple(getattr(one, name)() for name in tests) for role, one in messages.items()
    } == {
        "system": (False, False, False, False, True),
        "user": (True, False, False, False, False),
        "assistant": (False, True, False, False, False),
        "tool": (False, False, True, False, False),
        "developer": (False, False, False, True, True),
    }
    assert {role for role, one in messages.items() if one.has_role("user", "assistant")} == {
        "user",
        "assistant",
    }
    for one in messages.values():
        for field in ("role", "content", "name", "tool_call_id", "tool_calls", "metadata"):
            with pytest.raises(ValidationError):
                setattr(one, field, getattr(one, field))


async def test_the_answers_of_two_calls_stand_behind_the_assistant_in_call_order(
    redis_url: str,
) -> None:
    """MSG-11: assistant first, then one tool message per call, with output or error, and name."""
    script = (call(("broken", {}), ("look", {"what": "a"})), say("done"))
    policy = ErrorPolicy.retry_tool_errors(3)
    async with opened_run(redis_url, *script, tools=(look, broken), error_policy=policy) as (
        desk,
        hands,
        run_id,
    ):
        await hands.step(run_id, 0)
        messages = (await desk.stored(run_id)).state.messages
    assert [(one.role, one.name, one.tool_call_id) for one in messages] == [
        ("user", None, None),
        ("assistant", None, None),
        ("tool", "broken", "c0"),
        ("tool", "look", "c1"),
    ]
    assert "no luck" in messages[2].text
    assert messages[3].text == "seen a"


@pytest.mark.parametrize(
    ("content", "stored"),
    [
        (None, ""),
        ("", ""),
        ('{"what": "a"}', ""),
        ("I'll look it up", "I'll look it up"),
    ],
)
async def test_arguments_of_calls_never_become_text_of_the_history(
    redis_url: str, server: RawModelServer, openai: HttpModel, content: str | None, stored: str
) -> None:
    """MSG-12, MSG-13, MSG-14, MSG-15, MSG-16: null, empty, leaked and real text beside a call."""
    server.answers(
        completion(content, tool_calls=[wire_call('{"what": "a"}')]), completion("It is a.")
    )
    settings = ModelSettings(base_url=server.base_url)
    agent = Agent("wired", model=openai, tools=[look], settings=settings)
    async with bench(redis_url, agent) as desk:
        run_id = await desk.create()
        await Hands(desk, agent).finish(run_id)
        stored_run = await desk.stored(run_id)
    texts = [one.text for one in stored_run.state.messages if one.is_assistant()]
    assert texts == [stored, "It is a."]
    assert stored_run.log[0].result.thought == (stored or None)
    (carried,) = stored_run.state.messages[1].tool_calls
    assert carried.arguments == {"what": "a"}


async def test_a_call_without_an_id_gets_one_that_its_answer_bears_too(
    redis_url: str, server: RawModelServer, openai: HttpModel
) -> None:
    """TOOL-08: equal in call, answer and record, after a reload."""
    nameless = wire_call('{"what": "a"}')
    del nameless["id"]
    server.answers(completion(None, tool_calls=[nameless]), completion("It is a."))
    settings = ModelSettings(base_url=server.base_url)
    agent = Agent("wired", model=openai, tools=[look], settings=settings)
    async with bench(redis_url, agent) as desk:
        run_id = await desk.create()
        await Hands(desk, agent).finish(run_id)
        stored = await desk.stored(run_id)
    asked, answer = stored.state.messages[1:3]
    assert asked.tool_calls[0].id
    assert answer.tool_call_id == asked.tool_calls[0].id == stored.state.tool_results[0].call_id
    assert server.received[1].body["messages"][2]["tool_call_id"] == answer.tool_call_id


async def test_a_signature_of_a_call_goes_back_from_redis(
    redis_url: str, server: RawModelServer, openai: HttpModel
) -> None:
    """Gemini refuses calls without it, behind chat completions too."""
    signed = {"extra_content": {"google": {"thought_signature": "c2ln"}}}
    made = wire_call('{"what": "a"}', **signed)
    server.answers(completion(None, tool_calls=[made]), completion("It is a."))
    settings = ModelSettings(base_url=server.base_url)
    agent = Agent("wired", model="openai:gemini-3-pro", tools=[look], settings=settings)
    models = Models(providers={"openai": lambda: openai})
    async with bench(redis_url, agent) as desk:
        run_id = await desk.create()
        await Hands(desk, agent, models=models).finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.output == "It is a."
    (sent,) = server.received[1].body["messages"][1]["tool_calls"]
    assert sent == {**made, "function": {"name": "look", "arguments": '{"what":"a"}'}}


async def test_the_same_agent_takes_the_same_steps_with_another_provider(
    redis_url: str, server: RawModelServer, openai: HttpModel
) -> None:
    """LLM-05: only the model's name differs; the steps are told apart by nothing else."""
    answers = (completion("Looking.", tool_calls=[wire_call('{"what": "a"}')]), completion("It."))
    server.answers(*answers)
    own = Script([call(("look", {"what": "a"}), text="Looking."), say("It.")])
    shapes: list[Any] = []
    for provider in ("openai", "vllm"):
        settings = ModelSettings(base_url=server.base_url)
        agent = Agent("wired", model=f"{provider}:m", tools=[look], settings=settings)
        models = Models(providers={"openai": lambda: openai, "vllm": lambda: own})
        async with bench(redis_url, agent) as desk:
            run_id = await desk.create()
            await Hands(desk, agent, models=models).finish(run_id)
            stored = await desk.stored(run_id)
        steps = [
            (step.type, step.thought, [(one.tool_name, one.result) for one in step.tool_calls])
            for step in stored.result().steps
        ]
        said = [(one.role, one.text) for one in stored.state.messages]
        shapes.append((steps, said, stored.result().output, stored.result().usage))
    assert shapes[0] == shapes[1]
    assert (len(server.received), len(own.requests)) == (2, 2)


async def test_each_agent_has_its_own_model_address_and_output_limit(
    redis_url: str, openai: HttpModel
) -> None:
    """LLM-19: two agents of one worker, as two servers see them."""
    async with RawModelServer().running() as one, RawModelServer().running() as other:
        for server, model, limit in ((one, "m1", 7), (other, "m2", 9)):
            server.answers(completion("hi"))
            settings = ModelSettings(base_url=server.base_url, max_tokens=limit)
            agent = Agent("wired", model=f"openai:{model}", settings=settings)
            async with bench(redis_url, agent) as desk:
                run_id = await desk.create()
                models = Models(providers={"openai": lambda: openai})
                await Hands(desk, agent, models=models).finish(run_id)
                assert (await desk.stored(run_id)).result().output == "hi"
        bodies = [received.body for server in (one, other) for received in server.received]
    assert [(body["model"], body["max_tokens"]) for body in bodies] == [("m1", 7), ("m2", 9)]


async def test_a_stored_run_replays_through_two_adapters(
    redis_url: str, server: RawModelServer, openai: HttpModel
) -> None:
    """MSG-07, LLM-05: the conversation that Redis keeps is no provider's own."""
    script = (call(("look", {"what": "a"}), text="looking"), say("done"))
    async with opened_run(redis_url, *script, tools=(look,)) as (desk, hands, run_id):
        await hands.finish(run_id)
        messages = (await desk.stored(run_id)).state.messages
    server.answers(completion("again"))
    settings = ModelSettings(base_url=server.base_url)
    request = ModelRequest(model="m", messages=messages[:3], settings=settings)
    own = Script(script)
    assert (await openai.generate(request)).content == "again"
    assert (await own.generate(request)).content == "done"
    sent = server.received[0].body["messages"]
    assert [one["role"] for one in sent] == [one.role for one in own.requests[0].messages]
    assert from_blocks(to_blocks(messages)) == messages


async def test_blocks_and_metadata_are_stored_as_they_came_and_metadata_is_not_sent(
    redis_url: str, server: RawModelServer, openai: HttpModel
) -> None:
    """MSG-06, MSG-17: through a client, Redis, a whole step and the model's wire."""
    hologram = {"hologram": {"x": [1, None]}}
    marks = {"tool_calls": ["MARK"], "tool_call_id": "MARK", "tool_name": "MARK", "result": "MARK"}
    asked = tuple(
        one.model_copy(update={"metadata": marks})
        for one in from_blocks(
            [
                {"role": "user", "content": [{"text": "What is the weather in Paris?"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"text": "I'll check"},
                        {"toolUse": {"toolUseId": "t1", "name": "look", "input": {"what": "sky"}}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"toolResult": {"toolUseId": "t1", "content": [{"text": "Sun"}]}}],
                },
                {"role": "user", "content": [hologram, {"text": "And this?"}]},
            ]
        )
    )
    server.answers(completion("A lamp."))
    settings = ModelSettings(base_url=server.base_url)
    agent = Agent("wired", model=openai, tools=[look], settings=settings)
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(agent, asked)
        async with InlineWorker(load_settings(redis_url=redis_url), [agent]) as worker:
            await worker.finish(run_id)
        stored = (await fleet.runs.show(run_id)).state.messages
    assert stored[:-1] == asked
    (received,) = server.received
    assert b"MARK" not in received.raw
    assert received.body["messages"][-1]["content"] == [
        hologram,
        {"type": "text", "text": "And this?"},
    ]


class Unprintable:
    """What JSON has no form for."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        ([True, 1.5], "[true,1.5]"),
        (None, "null"),
        (False, "false"),
        (7, "7"),
    ],
)
async def test_a_tools_value_reaches_the_model_as_predictable_text(
    redis_url: str, value: Any, text: str
) -> None:
    """MSG-19: through a whole step, as the next request shows it."""

    @tool(read_only=True)
    def give() -> Any:
        """Return the value."""
        return value

    async with opened_run(redis_url, call(("give", {})), say("done"), tools=(give,)) as (
        _,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        assert isinstance(hands.agent.llm, Script)
        assert hands.agent.llm.requests[1].messages[-1].text.replace(" ", "") == text


async def test_a_value_that_json_has_no_form_for_is_an_error_with_a_clear_prefix(
    redis_url: str,
) -> None:
    """MSG-19, ERR-25: no exception of the store loses the run."""

    @tool(read_only=True)
    def give() -> Any:
        """Return what cannot be stored."""
        return Unprintable()

    async with opened_run(redis_url, call(("give", {})), say("done"), tools=(give,)) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert stored.state.messages[-1].text.lower().startswith("error")
    assert stored.result().steps[0].tool_calls[0].is_error
