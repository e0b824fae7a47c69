"""Long logs, large steps and journals: no script reads them whole, and a claim has all of them."""

from typing import Any

import pytest
from support.runs.long_runs import AGENT, STEPS, long_run, said
from support.runs.stored_runs import answered, bench, called

from stepfleet.orchestrator.protocol.claim import Refusal, Refused, Work
from stepfleet.orchestrator.protocol.waiting import NOTHING
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store import lua
from stepfleet.orchestrator.store.lua import run_script
from stepfleet.orchestrator.store.runs.steps import LOST_WHILE_READ

LARGEST = 2 * 262_144
"""Bytes that one reply may have here: its bound, and one record."""


class Counting(Connection):
    """A connection that notes scripts and the size of their replies."""

    async def execute(self, *command: Any) -> Any:
        reply = await super().execute(*command)
        if command[0] in ("EVALSHA", "EVAL"):
            SEEN.append(_size(reply))
        return reply


SEEN: list[int] = []


def _size(reply: Any) -> int:
    if isinstance(reply, list):
        return sum(map(_size, reply))
    return len(reply) if isinstance(reply, str) else 8


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepfleet.orchestrator.store.store.Connection", Counting)
    SEEN.clear()


async def test_a_claim_reads_a_long_log_in_pages(redis_url: str) -> None:
    """All of it arrives, in its order, and none of the replies is large."""
    async with bench(redis_url, AGENT, lease=600.0) as desk:
        run_id = await long_run(desk)
        SEEN.clear()
        claim = await desk.claim(run_id, STEPS)
        assert said(claim) == list(range(STEPS))
        assert len(claim.state.tool_results) == STEPS
        assert len(SEEN) == -(-(STEPS + 1) // 200)
        await desk.commit(claim, called(claim))
        again = await desk.claim(run_id, STEPS + 1)
        assert len(said(again)) == STEPS
        assert (await desk.commit(again, answered(again))).applied


async def test_no_reply_is_much_larger_than_its_bound(redis_url: str) -> None:
    """Few steps may be large, too: what a script reads is bounded in bytes."""
    async with bench(redis_url, AGENT, lease=600.0) as desk:
        text = "".join(f"{n:x}" for n in range(40_000))  # packed, it is half as large
        run_id = await long_run(desk, steps=30, text=text)
        SEEN.clear()
        claim = await desk.claim(run_id, 30)
        assert said(claim) == list(range(30))
        assert len(SEEN) > 3
        assert max(SEEN) < LARGEST


async def test_an_ordinary_claim_is_one_round_trip(redis_url: str) -> None:
    async with bench(redis_url, AGENT, lease=600.0) as desk:
        run_id = await desk.create()
        for step in range(60):
            SEEN.clear()
            claim = await desk.claim(run_id, step)
            assert len(SEEN) == 1
            assert len(claim.state.tool_results) == step
            await desk.commit(claim, called(claim))
        header = await desk.header(run_id)
        log = await desk.opened.connection.execute("HGETALL", f"{desk.opened.keys.run(run_id)}:log")
        kept = [name for name in log if name.isdigit() or name == "input:0"]
        assert header["logged"] == f"60 {sum(len(log[name]) for name in kept)}"


async def test_a_large_journal_is_read_in_pages(redis_url: str) -> None:
    """Results that a dead worker has left are all there for the next one."""
    async with bench(redis_url, AGENT, lease=600.0) as desk:
        run_id = await desk.create()
        claim = await desk.claim(run_id)
        attempt = called(claim)
        large = attempt.records[0].model_copy(update={"result": "r" * 50_000})
        results = dict.fromkeys(range(20), large)
        await desk.steps.journal(claim, 0.1, response=attempt.response, started=tuple(results))
        await desk.steps.journal(claim, 0.2, results=results)
        await desk.opened.connection.execute(
            "HSET", desk.opened.keys.run(run_id), "token", "", "lease", 0
        )
        SEEN.clear()
        again = await desk.claim(run_id)
        assert again.journal.response == attempt.response
        assert again.journal.results == results
        assert again.journal.started == frozenset(results)
        assert again.overdue == NOTHING
        assert len(SEEN) >= 4
        assert max(SEEN) < LARGEST


@pytest.mark.parametrize("change", ["token", "step", "leased_at", "status"])
async def test_a_step_that_is_taken_over_while_its_log_is_read_is_refused(
    change: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of two logs are never one conversation: not under another token, step or claim."""
    async with bench(redis_url, AGENT, lease=600.0) as desk:
        run_id = await long_run(desk)
        SEEN.clear()
        key = desk.opened.keys.run(run_id)

        async def taken_over(connection: Connection, name: str, *args: Any) -> Any:
            if name == "page":
                await desk.opened.connection.execute(
                    *(("DEL", key) if change == "status" else ("HSET", key, change, "7"))
                )
            return await run_script(connection, name, *args)

        monkeypatch.setattr(lua, "run_script", taken_over)
        found = await desk.steps.claim(Work(run_id, STEPS), "mine")
        assert found == Refusal(Refused.STALE, LOST_WHILE_READ)


async def test_reading_a_long_log_renews_the_lease(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow link may need longer than a lease for all of it."""
    async with bench(redis_url, AGENT, lease=600.0) as desk:
        run_id = await long_run(desk)
        SEEN.clear()
        key = desk.opened.keys.run(run_id)

        async def late(connection: Connection, name: str, *args: Any) -> Any:
            if name == "page":
                await desk.opened.connection.execute("HSET", key, "lease", 1)
            return await run_script(connection, name, *args)

        monkeypatch.setattr(lua, "run_script", late)
        claim = await desk.claim(run_id, STEPS)
        header = await desk.header(run_id)
        assert int(header["lease"]) > 600_000 + claim.now.timestamp() * 1000 - 1
        assert await desk.due(run_id) == float(header["lease"])
        assert (await desk.refused(run_id, STEPS)).why is Refused.LEASED
