"""`explain`, `show` and the error of a wait that was too short name what a run waits for."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import orjson
import pytest
from rich.console import Console, RenderableType
from support.deadlines import until
from support.runs.scripted_steps import Script, call
from support.runs.stored_runs import Bench, failed, plain_agent
from support.runs.waits import wait_of

from stepfleet.orchestrator import Agent, AsyncFleet, tool
from stepfleet.orchestrator.cli.explain import explanation_picture, read_explanation
from stepfleet.orchestrator.cli.look import read_tree, show_picture
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store import keys
from stepfleet.worker.runtime.inline import InlineWorker

AGENT = plain_agent()
BENCH = {"agent": AGENT, "lease": 600, "grace": 60}
NO_WORKER = "no worker is alive for queue stepfleet: stepfleet worker --agents MODULE"
PAUSED = "the fleet is paused: stepfleet resume --all"


@tool(approval=True)
def pay(usd: int) -> str:
    """Pay somebody."""
    return f"paid {usd}"


def printed(shown: RenderableType) -> str:
    console = Console(width=300)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


async def told(fleet: AsyncFleet, run_id: str) -> tuple[str, str]:
    """Return what `explain` and `show` print of a run."""
    why = await read_explanation(run_id, None, fleet)
    shown = await read_tree(run_id, None, fleet)
    return printed(explanation_picture(why)), printed(show_picture(shown, full=False))


async def says(wait: Callable[[float], Awaitable[object]], text: str) -> None:
    """Wait until the error of a short wait has that text: a busy machine may be slow to read."""

    async def is_said() -> bool:
        with pytest.raises(TimeoutError) as caught:
            await wait(0.1)
        return str(caught.value) == text

    await until(is_said, what=text)


async def reported(desk: Bench, *agents: str) -> None:
    """Report a worker with these agents."""
    now = (await desk.opened.connection.now()).timestamp()
    report = {"seen": now, "slots": 2, "agents": agents, "queues": ["stepfleet"]}
    key = desk.opened.keys.of(keys.WORKERS)
    await desk.opened.connection.execute("HSET", key, "elsewhere:5", orjson.dumps(report).decode())


async def test_a_queued_run_names_the_missing_worker_and_the_pause(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await fleet.submit(AGENT, "hi")
    for text in await told(fleet, run_id):
        assert NO_WORKER in text
    await reported(desk, "other")
    for text in await told(fleet, run_id):
        assert f"no worker that is alive has agent {AGENT.name!r} (they have: other)" in text
    await reported(desk, AGENT.name)
    assert await fleet.runs.standstill(run_id) == ""
    assert "queued: no step has been evaluated yet" in (await told(fleet, run_id))[0]
    await fleet.pause()
    for text in await told(fleet, run_id):
        assert PAUSED in text
    await fleet.resume()
    await fleet.runs.cancel(run_id)
    for text in await told(fleet, run_id):
        assert "no worker" not in text


async def test_a_run_names_the_next_attempt_at_a_step_that_was_refused_for_long(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await fleet.submit(AGENT, "hi")
    claim = await desk.claim(run_id)
    refused = failed(claim, transient=True, limited=True)
    error = refused.error.model_copy(update={"message": "api answered 429: slow down"})
    await desk.commit(claim, replace(refused, error=error, retry_after=3000.0))
    at = (await wait_of(desk, run_id))["deadline"] / 1000
    text = (
        f"its next attempt at {datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC, as the provider "
        "asked (api answered 429: slow down)"
    )
    for said in await told(fleet, run_id):
        assert f"step 1 waits for {text}" in said
    assert (await fleet.runs.timeline(run_id)).waits_for == text


async def test_a_run_names_those_before_it(fleet: AsyncFleet) -> None:
    first = await fleet.submit(AGENT, "one")
    second = await fleet.submit(AGENT, "{output}", after=first)
    for text in await told(fleet, second):
        assert f"begins when these have ended: {first} (queued)" in text


async def test_a_run_names_the_person_that_one_before_it_waits_for(
    fleet: AsyncFleet, redis_url: str
) -> None:
    cashier = Agent("cashier", model=Script([call(("pay", {"usd": 7}))]), tools=[pay])
    clerk = Agent("clerk", model=Script([call(("cashier", {"input": "x"}))]), agents=[cashier])
    own = Agent("own", model=Script([call(("pay", {"usd": 8}))]), tools=[pay])
    above, alone = await fleet.submit(clerk, "begin"), await fleet.submit(own, "begin")
    last = await fleet.submit(AGENT, "{count}", after=[above, alone])

    async def both_wait() -> bool:
        return (await fleet.overview()).waiting_for_people == 2

    agents = [clerk, cashier, own]
    async with InlineWorker(load_settings(redis_url=redis_url), agents) as worker:
        work = [asyncio.create_task(worker.finish(one)) for one in (above, alone)]
        try:
            await until(both_wait, what="two calls that wait")
        finally:
            for one in work:
                one.cancel()
                with suppress(asyncio.CancelledError):
                    await one

    why = await read_explanation(last, None, fleet)
    assert [(one.agent, one.tool) for one in why.before] == [("cashier", "pay"), ("own", "pay")]
    text = printed(explanation_picture(why))
    assert "Before it cashier waits for a person's approval" in text
    waits = "it is in_progress, and waits for an approval of 'pay' by a person: stepfleet approvals"
    await says(partial(fleet.runs.wait, alone), f"run {alone} has not ended after 0.1 s; {waits}")


async def test_a_wait_that_was_too_short_names_the_run_and_what_that_waits_for(
    fleet: AsyncFleet, desk: Bench
) -> None:
    first = await fleet.submit(AGENT, "one")
    second = await fleet.submit(AGENT, "{output}", after=first)
    late = "has not ended after 0.1 s; it is queued"
    after = f"begins when these have ended: {first} (queued)"
    await says(partial(fleet.runs.wait, second), f"run {second} {late}, and {after}")
    await says(partial(fleet.runs.wait, first), f"run {first} {late}: {NO_WORKER}")
    await reported(desk, AGENT.name)
    await says(partial(fleet.runs.wait, first), f"run {first} {late}")


async def test_a_wait_for_a_batch_that_was_too_short_says_how_far_it_is(fleet: AsyncFleet) -> None:
    batch = await fleet.submit_batch([{"input": "a"}, {"input": "b"}], AGENT)
    late = "has not ended after 0.1 s;"
    await says(batch.wait, f"batch {batch.id} {late} 0 of 2 runs have ended; {NO_WORKER}")
    following = await batch.then(AGENT, "{output}")
    waits = f"it waits for the end of batch {batch.id}"
    await says(following.wait, f"batch {following.id} {late} {waits}")
