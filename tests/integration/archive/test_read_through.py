"""Runs of every kind look the same to every reader before and after they were archived."""

from pathlib import Path
from typing import Any

import pytest
from support.runs.archives import archive, check_files, ended, in_redis, move, seen
from support.runs.long_runs import long_run
from support.runs.opened_runs import finish_with_waits
from support.runs.scripted_steps import Hands, Script, call, say
from support.runs.stored_runs import Bench, answered, called, failed, plain_agent
from support.runs.tools import broken, look

from stepfleet.orchestrator import Agent, AsyncFleet, ErrorPolicy, tool
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.records.base import SCHEMA_VERSION
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker

LOOK = call(("look", {"what": "a"}), text="still looking")
SCHEMA = {"title": "Fact", "type": "object", "properties": {"size": {"type": "integer"}}}
AGAIN = call(("structured_response", {"structured": {"size": 7}}))


@tool
def foreign() -> str:
    """Return text that is no valid Unicode, and much that is."""
    return "half \ud83d a pair, \u2028 and \x00 and 漢 \U0001f600"


KINDS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "completed": ([LOOK, say("done")], {}),
    "failed": ([ModelError("bad request")], {}),
    "steps": ([LOOK], {"max_steps": 3}),
    "tokens": ([LOOK], {"token_limit": 30}),
    "broken": ([call(("broken", {}))], {"error_policy": ErrorPolicy.retry_tool_errors(2)}),
    "structured": ([AGAIN], {"output_type": SCHEMA}),
    "foreign": ([call(("foreign", {})), say("na\u00efve \u2028 \U0001f600")], {}),
}


async def check_same(desk: Bench, fleet: AsyncFleet, *run_ids: str) -> None:
    """Assert that runs look the same before and after they are archived, and after they return."""
    before = {one: await seen(fleet, one) for one in run_ids}
    page = (await fleet.runs.page()).runs
    assert (await move(desk)).runs == len(run_ids)
    assert await in_redis(desk, run_ids) == []
    for again in (False, True):
        for one in run_ids:
            after = await seen(fleet, one)
            for name, value in before[one].items():
                assert after[name] == value, (one, name, again)
        assert (await fleet.runs.page()).runs == page
        await check_files(desk)
        if not again:
            assert await desk.opened.returning.restore(run_ids) == len(run_ids)
            assert await in_redis(desk, run_ids) == list(run_ids)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_run_looks_the_same(kind: str, redis_url: str, tmp_path: Path) -> None:
    """OPS-05: results, events, pages, costs and conversations of an archived run."""
    answers, config = KINDS[kind]
    agent = Agent("scripted", model=Script(answers), tools=(look, broken, foreign), **config)
    async with archive(redis_url, tmp_path, agent) as (desk, fleet):
        about = {"tenant": "Zoë & Co", "metadata": {"a": "\u2028 漢", "b": [1, None, 1e-9]}}
        run_id = await desk.create(batch="", **about)
        await finish_with_waits(Hands(desk, agent), run_id)
        await check_same(desk, fleet, run_id)


async def test_a_tree_of_runs_and_a_hand_over_look_the_same(redis_url: str, tmp_path: Path) -> None:
    """OPS-05: a run with those that its calls have started, and one that another agent ended."""
    child = Agent("researcher", model=Script([say("found it")]), time_limit=None)
    billing = Agent("billing", model=Script([LOOK, say("paid")]), tools=(look,), time_limit=None)
    ask = call(("researcher", {"input": "herring"}))
    over = call(("transfer_to_billing", {"reason": "an invoice"}))
    script = Script([ask, over, say("joined")])
    parent = Agent("editor", model=script, agents=(child,), handoffs=(billing,), time_limit=None)
    async with archive(redis_url, tmp_path, parent) as (desk, fleet):
        run_id = await fleet.submit(parent, "write", tenant="t", metadata={"a": 1})
        async with InlineWorker(load_settings(redis_url=redis_url), [parent]) as worker:
            await worker.finish(run_id)
        tree = await fleet.runs.tree(run_id)
        (below,) = (one.run.run_id for one in tree.below)
        assert (await fleet.runs.result(run_id)).steps[-1].agent == "billing"
        await check_same(desk, fleet, run_id, below)
        assert [one.run_id for one in (await fleet.runs.page(parent=run_id)).runs] == [below]


async def test_what_happens_to_runs_looks_the_same(redis_url: str, tmp_path: Path) -> None:
    """OPS-05: cancelled, lost, retried, continued, forked and older runs."""
    async with archive(redis_url, tmp_path, plain_agent(max_steps=6)) as (desk, fleet):
        cancelled = await desk.create(batch="")
        await fleet.runs.cancel(cancelled, "enough of «this»")
        lost = await desk.create(batch="")
        await desk.claim(lost)
        await desk.opened.connection.execute("HSET", desk.opened.keys.run(lost), "lease", 1)
        claim = await desk.claim(lost)
        await desk.commit(claim, answered(claim))
        assert (await fleet.runs.show(lost)).lost
        again = await ended(desk, well=False)
        await fleet.runs.retry(again)
        claim = await desk.claim(again)
        await desk.commit(claim, called(claim))
        fork = await fleet.history.fork(again, at=1)
        claim = await desk.claim(fork, 1)
        await desk.commit(claim, failed(claim))
        claim = await desk.claim(again, 1)
        await desk.commit(claim, answered(claim))
        await fleet.runs.send(again, "and now?")
        claim = await desk.claim(again, 2)
        await desk.commit(claim, answered(claim))
        older = await ended(desk)
        version = ("HSET", desk.opened.keys.run(older), "v", SCHEMA_VERSION - 1)
        await desk.opened.connection.execute(*version)
        await check_same(desk, fleet, cancelled, lost, again, fork, older)


async def test_long_and_large_runs_come_whole(redis_url: str, tmp_path: Path) -> None:
    """OPS-05: thousands of steps, megabytes in one, and a log whose beginning is gone."""
    async with archive(redis_url, tmp_path, plain_agent(max_steps=100_000)) as (desk, fleet):
        runs = (
            await long_run(desk, 3_000),
            await long_run(desk, 2, "x" * 5 * 1024 * 1024),
            await long_run(desk, 300),
        )
        key, execute = desk.opened.keys.run(runs[-1]), desk.opened.connection.execute
        await execute("HDEL", f"{key}:log", *range(250))
        await execute("HSET", key, "since", "250 input:0")
        for one in runs:
            await execute("HSET", desk.opened.keys.run(one), "batch", "")
            await fleet.runs.cancel(one)
        before = [await fleet.runs.result(one) for one in runs]
        assert [len(one.steps) for one in before] == [3_000, 2, 50]
        assert (await move(desk)).runs == len(runs)
        assert await in_redis(desk, runs) == []
        assert [await fleet.runs.result(one) for one in runs] == before
        assert (await fleet.runs.timeline(runs[0], first=2_990)).steps[-1].step == 3_000
        assert await desk.opened.returning.restore(runs) == len(runs)
        assert [await fleet.runs.result(one) for one in runs] == before
