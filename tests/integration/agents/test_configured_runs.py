"""What a run is configured with, in a real store: kept, its own, and without what is not stored."""

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis
from support.runs.packed_records import hidden
from support.runs.scripted_steps import Hands, Script, call, say
from support.runs.stored_runs import bench
from support.runs.tools import look

from stepfleet.orchestrator import (
    Agent,
    AgentBuilder,
    AgentState,
    AsyncFleet,
    ContinuationDecision,
    ErrorPolicy,
    LLMResponse,
    StopReason,
    Subscribers,
    tool,
    when,
)
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker

MARKER = "raw-payload-marker"


def said(found: Any) -> bytes:
    """Return a reply of Redis, and what is packed in it."""
    return f"{found!r} {hidden(found)}".encode()


async def dumped(redis_url: str) -> bytes:
    """Return everything that is in Redis, as its own dump holds it."""
    client = Redis.from_url(redis_url)
    try:
        found = b""
        async for key in client.scan_iter("*"):
            found += key
            kind = await client.type(key)
            match kind:
                case b"hash":
                    found += said(await client.hgetall(key))
                case b"stream":
                    found += said(await client.xrange(key))
                case b"string":
                    found += await client.get(key) or b""
                case b"list":
                    found += repr(await client.lrange(key, 0, -1)).encode()
                case b"zset":
                    found += repr(await client.zrange(key, 0, -1)).encode()
                case b"set":
                    found += repr(await client.smembers(key)).encode()
                case _:
                    raise AssertionError(kind)
    finally:
        await client.aclose()
    return found


async def finish(redis_url: str, agent: Agent, *ids: str) -> None:
    async with InlineWorker(load_settings(redis_url=redis_url), [agent]) as worker:
        await worker.finish(*ids)


async def test_the_raw_payload_is_for_hooks_alone(redis_url: str) -> None:
    """LLM-13: neither state nor snapshots, checkpoints, events or journal have it."""
    heard: list[Any] = []
    answers = [
        call(("look", {"what": "kept"}), text="Looking.").model_copy(update={"raw": {"x": MARKER}}),
        say("It is there.", raw={"x": MARKER}),
    ]
    agent = Agent(
        "looker",
        model=Script(answers),
        tools=[look],
        broadcast="debug",
        subscribers=Subscribers(llm_response=lambda _, response: heard.append(response.raw)),
    )
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(agent, "hi")
        await finish(redis_url, agent, run_id)
        stored = await dumped(redis_url)
        snapshot = str(await fleet.history.snapshot(run_id))
        checkpoint = (await fleet.history.checkpoint(run_id)).to_json()
        events = [str(one) async for one in fleet.runs.events(run_id)]
    assert heard == [{"x": MARKER}] * 2
    assert b"seen kept" in stored
    assert MARKER.encode() not in stored
    assert not any(MARKER in text for text in (snapshot, checkpoint, *events))


async def test_a_journaled_answer_has_no_raw_payload(redis_url: str) -> None:
    """LLM-13: the journal of an open step."""
    reached, go_on = asyncio.Event(), asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait until the test has looked."""
        reached.set()
        await go_on.wait()
        return "waited"

    asked = call(("wait", {}), text="Waiting.").model_copy(update={"raw": {"x": MARKER}})
    agent = Agent("waiter", model=Script([asked, say("Done.")]), tools=[wait])
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(agent, "hi")
        working = asyncio.create_task(finish(redis_url, agent, run_id))
        await asyncio.wait_for(reached.wait(), 30)
        stored = await dumped(redis_url)
        go_on.set()
        await working
    assert b"Waiting." in stored
    assert MARKER.encode() not in stored


async def test_settings_of_one_run_do_not_touch_another(redis_url: str) -> None:
    """LLM-18: two runs at once on one worker, with different temperatures."""
    both = asyncio.Barrier(2)
    seen: dict[str, float | None] = {}

    async def answer(request: Any) -> LLMResponse:
        async with asyncio.timeout(30):
            await both.wait()
        seen[request.messages[-1].text] = request.settings.temperature
        return say("Done.")

    agent = Agent("writer", model=Script([answer]), settings={"temperature": 0.5, "max_tokens": 9})
    async with AsyncFleet(redis_url) as fleet:
        cold = await fleet.submit(agent, "cold", settings={"temperature": 0.0})
        hot = await fleet.submit(agent, "hot", settings={"temperature": 1.5})
        await finish(redis_url, agent, cold, hot)
        stored = [(await fleet.runs.show(one)).config.settings for one in (cold, hot)]
    assert seen == {"cold": 0.0, "hot": 1.5}
    assert [one.max_tokens for one in stored] == [9, 9]
    assert agent.config.settings.temperature == 0.5


async def test_a_run_keeps_its_configuration_when_its_agent_changes(redis_url: str) -> None:
    """CONF-07: the code is deployed anew in the midst of it; another worker goes on."""
    asked = Script([call(("look", {"what": "a"}))])
    before = Agent("clerk", model=asked, tools=[look], instructions="Old words.", max_steps=4)
    script = Script([say("unused"), say("Done.")])
    after = Agent("clerk", model=script, tools=[look], instructions="New words.", max_steps=9)
    async with bench(redis_url, before) as desk:
        running = await desk.create()
        await Hands(desk, before).step(running, 0)
        desk.agent = after
        fresh = await desk.create()
        deployed = Hands(desk, after)
        await deployed.finish(running)
        await deployed.finish(fresh)
        results = [(await desk.stored(one)).result() for one in (running, fresh)]
    assert [one.messages[0].text for one in script.requests] == ["Old words.", "New words."]
    assert [one.max_iterations for one in results] == [4, 9]
    assert [one.output for one in results] == ["Done.", "unused"]


async def test_what_the_builder_was_told_is_what_the_run_does(redis_url: str) -> None:
    """CONF-02: prompt, tools, limits, criteria, error policy, schema, budget and events."""

    @tool
    def fail() -> str:
        """Fail."""
        raise RuntimeError("no")

    heard: list[int] = []
    states: list[int] = []

    def asked_of(state: AgentState) -> ContinuationDecision:
        states.append(state.step_count)
        return ContinuationDecision.ALLOW_CONTINUATION

    answer = call(("structured_response", {"structured": {"usd": 3.5}}))
    script = Script([call(("look", {"what": "a"}), ("fail", {})), answer])
    schema = {
        "title": "Price",
        "type": "object",
        "properties": {"usd": {"type": "number"}},
        "required": ["usd"],
    }
    agent = (
        AgentBuilder("clerk")
        .with_model(script)
        .with_max_iterations(7)
        .with_max_tokens(500)
        .with_timeout(12)
        .with_system_prompt("Be brief.")
        .with_tools(look, fail)
        .with_criteria(when(asked_of))
        .with_error_policy(ErrorPolicy.retry_all(4))
        .with_cumulative_timeout(60)
        .with_budget(0.5)
        .with_output_type(schema)
        .with_events("debug")
        .with_events(Subscribers(step_end=lambda moment, _: heard.append(moment.step)))
        .build()
    )
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(agent, "hi")
        await finish(redis_url, agent, run_id)
        result = await fleet.runs.result(run_id)
        types = {one["type"] async for one in fleet.runs.events(run_id)}
    asked = script.requests[0]
    assert asked.messages[0].text.startswith("Be brief.")
    assert (asked.settings.max_tokens, asked.settings.timeout) == (500, 12)
    assert {"look", "fail", "structured_response"} <= {one.name for one in asked.tools}
    # Under the default policy the failed tool would have ended the run.
    assert (result.structured, result.max_iterations) == ({"usd": 3.5}, 7)
    assert result.outcome is not None
    found = {one.criterion: one.context.get("limit") for one in result.outcome.evaluations}
    assert (found["StepsLimit"], found["CumulativeExecutionTimeLimit"]) == (7, 60)
    assert set(states) == {0, 1, 2}
    assert heard == [1, 2]
    assert "agent.continuation" in types


@pytest.mark.parametrize(("given", "expected"), [({}, 10), ({"max_steps": 7}, 7)])
async def test_a_result_says_what_its_limit_was(
    redis_url: str, given: dict[str, Any], expected: int
) -> None:
    """CONF-09"""
    agent = Agent("writer", model=Script([say("Done.")]))
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(agent, "hi", **given)
        await finish(redis_url, agent, run_id)
        result = await fleet.runs.result(run_id)
    assert (result.max_iterations, result.debug().max_iterations) == (expected, expected)


async def test_an_agents_own_prices_are_what_its_runs_and_forks_cost(redis_url: str) -> None:
    """CONF-01, COST-09: also the summaries' calls; a budget counts them."""
    agent = Agent(
        "priced",
        model=Script([*[call(("look", {"what": "it"}))] * 2, say("Seen.")]),
        tools=[look],
        pricing={"script": {"input": 1000, "output": 2000}},
        budget_usd=0.035,
    )
    per_call = 10 * 1000 / 1e6 + 5 * 2000 / 1e6
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(agent, "hi")
        await finish(redis_url, agent, run_id)
        result = await fleet.runs.result(run_id)
        fork = await fleet.history.fork(run_id, at=1, budget_usd=1.0)
        await finish(redis_url, agent, fork)
        forked = await fleet.runs.result(fork)
        stats = await fleet.history.get_cost_stats(fork)
    assert [step.cost_usd for step in result.steps] == pytest.approx([per_call] * 2)
    assert result.stop_reason is StopReason.GUARD
    assert [step.cost_usd for step in forked.steps] == pytest.approx([per_call] * 3)
    assert stats.by_model["script"].cost == pytest.approx(forked.cost_usd)


async def test_a_summary_costs_what_the_agent_says_of_its_model(redis_url: str) -> None:
    """CONF-01, MEM-07: the price of the summary's own model."""
    looks = iter(range(3))

    async def answer(request: Any) -> LLMResponse:
        if not request.tools:
            return say("It was looked for.")
        return say("Seen.") if next(looks, None) is None else call(("look", {"what": "it"}))

    agent = Agent(
        "shortener",
        model=Script([answer]),
        tools=[look],
        memory={"summarize_after": 3},
        pricing={"script": {"input": 0, "output": 1000}},
    )
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(agent, "hi")
        await finish(redis_url, agent, run_id)
        result = await fleet.runs.result(run_id)
    calls = [step.usage.llm_calls for step in result.steps if step.usage]
    assert sum(calls) > len(result.steps), "no summary was made"
    assert [step.cost_usd for step in result.steps] == pytest.approx([0.005 * n for n in calls])
