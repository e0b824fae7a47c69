"""How many calls wait for people, and why one is not decided."""

from typing import Any

import pytest
from support.runs.asking_runs import asks, clerk, waiting, worked_on
from support.runs.scripted_steps import Script, call, say

from stepfleet.orchestrator import Agent, AsyncFleet, ConfigurationError


async def why_not(fleet: AsyncFleet, run_id: str, **options: Any) -> str:
    """Return why nothing of the run is decided."""
    with pytest.raises(ConfigurationError) as caught:
        await fleet.decide(run_id, **options)
    return caught.value.message.replace(run_id, "RUN")


async def test_a_decision_that_does_not_fit_is_refused_with_what_fits(
    fleet: AsyncFleet, redis_url: str
) -> None:
    """Of another kind, for another call, made already, before and after its end."""
    asked = call(("pay", {"usd": 1}), ("ask_person", {"question": "which?"}))
    agent = clerk(asked, call(("ask_person", {"question": "?"})), asks(2), say("done"))
    run_id = await fleet.submit(agent, "pay")
    assert await why_not(fleet, run_id) == "run RUN waits for no decision (queued)"
    async with worked_on(redis_url, agent, run_id):
        await waiting(fleet, 2)
        several = await why_not(fleet, run_id, call=2)
        assert several.endswith("but for: 0 (approval, pay), 1 (question, ask_person)")
        await fleet.decide(run_id, call=0, by="ada")
        again = await why_not(fleet, run_id, call=0)
        assert again.startswith("call 0 of run RUN was approved by ada, 20")
        await fleet.decide(run_id, answer="red", by="bob")
        await waiting(fleet, 1, kind="question")
        assert (
            await why_not(fleet, run_id, kind="approval")
            == "run RUN asks a question: stepfleet decide RUN --answer TEXT, "
            "or stepfleet decide RUN --deny"
        )
        await fleet.decide(run_id, answer="blue", by="eve")
        await waiting(fleet, 1, kind="approval")
        assert (
            await why_not(fleet, run_id, kind="question", answer="x")
            == "run RUN asks no question, it waits for an approval of pay: "
            "stepfleet decide RUN --approve, or stepfleet decide RUN --deny"
        )
        await fleet.decide(run_id, approve=False, reason="why not", by="eve")
        assert (await fleet.runs.wait(run_id, timeout=30)).success
    ended = await why_not(fleet, run_id)
    assert ended.startswith("run RUN has ended (completed); its call of pay was denied by eve, 20")
    assert ended.endswith("UTC: why not")


async def test_a_decision_that_was_made_is_named_before_the_run_goes_on(
    fleet: AsyncFleet, redis_url: str
) -> None:
    agent = clerk(asks(10), say("done"))
    run_id = await fleet.submit(agent, "pay")
    async with worked_on(redis_url, agent, run_id):
        await waiting(fleet, 1)
    await fleet.decide(run_id, by="ada")
    again = await why_not(fleet, run_id)
    assert again.startswith("run RUN waits for no other decision: call 0 was approved by ada, 20")


async def test_runs_that_wait_for_other_runs_say_so(fleet: AsyncFleet, redis_url: str) -> None:
    below = clerk(asks(10), say("paid"))
    script = Script([call(("clerk", {"input": "pay"})), say("done")])
    boss = Agent("boss", model=script, agents=[below], time_limit=None)
    first = await fleet.submit(boss, "pay")
    second = await fleet.submit(below, "pay", after=[first])
    async with worked_on(redis_url, boss, first):
        await waiting(fleet, 1)
    assert (
        await why_not(fleet, first)
        == "run RUN waits for its sub-agents' runs; what these wait for: stepfleet explain RUN"
    )
    assert (
        await why_not(fleet, second)
        == "run RUN has not begun, it waits for other runs: stepfleet explain RUN"
    )


async def test_calls_of_a_batch_are_counted_up_to_a_thousand(
    fleet: AsyncFleet, redis_url: str
) -> None:
    """Those of a cancelled run do not count."""
    calls = [("pay", {"usd": usd}) for usd in range(40)]
    agent = clerk(call(*calls), say("done"))
    batch = await fleet.submit_batch([{"input": f"{n}"} for n in range(26)], agent)
    ids = list(batch.run_ids())
    async with worked_on(redis_url, agent, *ids):
        await waiting(fleet, 1040)
    counted = await fleet.approvals.of_batch(batch.id)
    assert str(counted) == "1,000 or more calls wait for people"
    await fleet.runs.cancel(ids[0])
    await fleet.runs.cancel(ids[1])
    assert str(await fleet.approvals.of_batch(batch.id)) == "960 calls wait for people"
