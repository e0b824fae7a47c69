"""Slim snapshots straight from Redis, and the hand-off between steps."""

import json
from base64 import b64encode
from random import randbytes
from typing import Any

import orjson
import pytest
from support.runs.opened_runs import opened_run
from support.runs.scripted_steps import Script, call, say
from support.runs.stored_runs import Bench, answered, called, plain_agent

from stepfleet.orchestrator import (
    AsyncFleet,
    ConfigurationError,
    Message,
    SlimSerializationConfig,
    SlimSerializer,
    tool,
)
from stepfleet.orchestrator.protocol.attempt import Answered
from stepfleet.orchestrator.protocol.claim import Claim

AGENT = plain_agent(max_steps=500, token_limit=None)
STEPS = 60
PRESETS = {
    "minimal": SlimSerializationConfig.minimal(),
    "standard": SlimSerializationConfig.standard(),
    "full": SlimSerializationConfig.full(),
    "one message": SlimSerializationConfig(max_messages=1, max_steps=3),
    "everything": SlimSerializationConfig(max_messages=10_000, max_steps=10_000),
    "steps only": SlimSerializationConfig(max_messages=0, max_steps=7),
    "nothing": SlimSerializationConfig(max_messages=-1, max_steps=-1),
}


BENCH: dict[str, Any] = {"agent": AGENT}


async def long_run(desk: Bench, fleet: AsyncFleet, text: str = "seen") -> str:
    """Return a run of 60 steps with a further message in the middle."""
    run_id = await desk.create()
    for step in range(STEPS):
        claim = await desk.claim(run_id, step)
        if step == STEPS // 2:
            await desk.commit(claim, answered(claim))
            await fleet.runs.send(run_id, "go on")
        else:
            await desk.commit(claim, worded(claim, text))
    return run_id


def worded(claim: Claim, text: str) -> Answered:
    """Return an attempt whose tool said `text`."""
    made = called(claim)
    return Answered(made.span, made.response, made.records, (text,), cost_usd=0.25)


@pytest.mark.parametrize("name", PRESETS)
async def test_a_snapshot_from_the_store_is_that_of_the_whole_state(
    fleet: AsyncFleet, desk: Bench, name: str
) -> None:
    """SER-03, SER-04, SER-05, SER-11"""
    run_id = await long_run(desk, fleet)
    run = await fleet.runs.show(run_id)
    steps = [logged.result for logged in run.log]
    assert await fleet.history.snapshot(run_id, PRESETS[name]) == SlimSerializer(
        PRESETS[name]
    ).serialize(run.state, steps)


async def test_the_standard_preset_is_taken_where_none_is_given(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await desk.create()
    snapshot = await fleet.history.snapshot(run_id)
    assert snapshot == await fleet.history.snapshot(run_id, SlimSerializationConfig.standard())
    assert (snapshot["status"], snapshot["step_count"], snapshot["steps"]) == ("queued", 0, [])
    assert [one["content"] for one in snapshot["messages"]] == ["Be brief.", "hello"]


async def test_what_a_snapshot_drops_is_not_read_from_redis(fleet: AsyncFleet, desk: Bench) -> None:
    """SER-25: bytes that Redis sends, for a run of 60 results of 50,000 characters.

    They are of a kind that does not become shorter when it is packed.
    """
    run_id = await long_run(desk, fleet, b64encode(randbytes(37_500)).decode())
    whole = await sent_for(desk, fleet, run_id, PRESETS["everything"])
    minimal = await sent_for(desk, fleet, run_id, PRESETS["minimal"])
    nothing = await sent_for(desk, fleet, run_id, PRESETS["nothing"])
    assert whole > STEPS * 50_000 * 0.9
    assert minimal < 11 * 51_000
    assert nothing < 20_000
    standard = await fleet.history.snapshot(run_id)
    assert len(json.dumps(standard)) < 120_000


async def sent_for(
    desk: Bench, fleet: AsyncFleet, run_id: str, config: SlimSerializationConfig
) -> int:
    """Return how many bytes Redis sends for a snapshot."""

    async def sent() -> int:
        stats = await desk.opened.connection.execute("INFO", "stats")
        return int(stats["total_net_output_bytes"])

    before = await sent()
    await fleet.history.snapshot(run_id, config)
    return await sent() - before


async def test_instructions_that_came_with_the_input_stay(fleet: AsyncFleet, desk: Bench) -> None:
    """SER-22"""
    given = [Message.system("Said with the input."), Message.user("hello")]
    run_id = await fleet.submit(AGENT, given, instructions="")
    for step in range(20):
        claim = await desk.claim(run_id, step)
        await desk.commit(claim, called(claim))
    snapshot = await fleet.history.snapshot(run_id, SlimSerializationConfig(max_messages=5))
    assert snapshot["messages"][0]["content"] == "Said with the input."
    assert len(snapshot["messages"]) == 5


async def test_an_unknown_run_is_reported(fleet: AsyncFleet) -> None:
    with pytest.raises(ConfigurationError, match="no run has the id"):
        await fleet.history.snapshot("00000000-0000-0000-0000-000000000000")


async def test_a_long_tool_result_reaches_the_next_request_whole(redis_url: str) -> None:
    """SER-20: the hand-off cuts no text, and has no step bodies but all counters."""
    text = "y" * 10_000

    @tool(read_only=True)
    def read() -> str:
        """Read."""
        return text

    answers = (call(("read", {}), text="reading"), say("done"))
    async with opened_run(redis_url, *answers, tools=(read,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        header = await desk.header(run_id)
        await hands.step(run_id, 1)
        script = hands.agent.llm
    assert isinstance(script, Script)
    assert script.requests[1].messages[-1].text == text
    handed = orjson.loads(header["slim"])
    assert not handed.keys() & {"messages", "tool_results", "steps"}
    assert handed["step_count"] == 1
    assert handed["current_step"]["has_tool_calls"] is True
    assert handed["usage"]["total_tokens"] == 15
    assert handed["info"]["cumulative_execution_seconds"] > 0


@pytest.mark.parametrize("name", ["minimal", "standard", "full"])
async def test_a_run_goes_on_from_the_messages_of_a_snapshot(redis_url: str, name: str) -> None:
    """SER-14: the model is asked with whole pairs of calls and results, and answers."""

    @tool(read_only=True)
    def look(what: str) -> str:
        """Look something up."""
        return f"seen {what}"

    looked = [call(("look", {"what": f"{n}"}), ("look", {"what": "b"})) for n in range(12)]
    async with opened_run(redis_url, *looked, say("done"), tools=(look,), max_steps=20) as (
        _,
        hands,
        run_id,
    ):
        for step in range(12):
            await hands.step(run_id, step)
        async with AsyncFleet(redis_url) as fleet:
            snapshot = json.loads(json.dumps(await fleet.history.snapshot(run_id, PRESETS[name])))
            state = SlimSerializer(PRESETS[name]).deserialize(snapshot)
            following = await fleet.submit(hands.agent, state.messages)
            await hands.finish(following)
            result = await fleet.runs.result(following)
        script = hands.agent.llm
    assert isinstance(script, Script)
    assert result.output == "done"
    asked = script.requests[-1].messages
    calls = [one.id for message in asked for one in message.tool_calls]
    results = [message.tool_call_id for message in asked if message.is_tool()]
    assert calls == results
    assert state.step_count == 12
