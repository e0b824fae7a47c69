"""Runs that begin with a log keep the invariants of the protocol; seeded bugs are found."""

import hashlib
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis
from support.protocol.audit import Auditor, check_invariants
from support.runs.stored_runs import Bench, answered, bench, called, failed, plain_agent

from stepfleet.orchestrator import AsyncFleet, ConfigurationError
from stepfleet.orchestrator.store import lua

AGENT = plain_agent(max_steps=3)
STATES = ("queued", "in_progress", "paused", "completed", "failed", "stopped", "cancelled")
MUTATIONS = {
    "it is in no index": ("redis.call('ZADD', due_key, now + number(ARGV[5]), run_id)", ""),
    "a paused one is due": ("elseif status ~= 'paused' then", "else"),
    "an ended one never expires": ("retain(ARGV[6])", ""),
    "an ended one is due": ("if TERMINAL[status] then", "if false then"),
    "it is made twice": ("redis.call('EXISTS', run_key) == 1", "false"),
    "another run of its id is taken for it": ("== ARGV[2] and 'mine'", "and 'mine'"),
    "its outcomes are elsewhere": (
        "log_key, outcomes_key, lost_key }",
        "log_key, log_key, lost_key }",
    ),
    "it stands elsewhere": ("'step', ARGV[4]", "'step', 0"),
    "its events are not told": ("emit(ARGV[8], ARGV[9], feed)", ""),
    "its message is not sent": ("redis.call('LPUSH', queue_key, ARGV[7])", ""),
}


@pytest.fixture
def auditor(redis_url: str) -> Iterator[Auditor]:
    with Redis.from_url(redis_url, decode_responses=True) as client:
        yield Auditor(client)


async def standing(state: str, fleet: AsyncFleet, desk: Bench) -> str:
    """Return a run that stands like that."""
    run_id = await desk.create("b0")
    if state == "queued":
        return run_id
    for step in range(3 if state == "stopped" else 1):
        claim = await desk.claim(run_id, step)
        await desk.commit(claim, failed(claim) if state == "failed" else called(claim))
    if state == "completed":
        claim = await desk.claim(run_id, 1)
        await desk.commit(claim, answered(claim))
    if state == "paused":
        await fleet.runs.pause(run_id)
    if state == "cancelled":
        await fleet.runs.cancel(run_id)
    return run_id


async def adopted_runs_are_sound(url: str, auditor: Auditor) -> None:
    """Restore and fork runs in every state; assert the invariants and what was asked for."""
    async with bench(url, AGENT, shards=2) as desk, AsyncFleet(url) as fleet:
        await desk.opened.configs.announce(AGENT.config)
        runs = {state: await standing(state, fleet, desk) for state in STATES}
        copies: dict[str, Any] = {}
        for state, run_id in runs.items():
            kept = await fleet.history.checkpoint(run_id)
            copy, waiting = str(uuid4()), await desk.queued()
            for _ in range(2):
                assert await fleet.history.restore(kept, run_id=copy) == copy
            at_work = state in ("queued", "in_progress")
            assert await desk.queued() == waiting + at_work
            copies[state] = copy
        forks = [await fleet.history.fork(runs["stopped"], at=1) for _ in range(2)]
        with pytest.raises(ConfigurationError, match="is there already"):
            await fleet.history.fork(runs["stopped"], at=2, new_run_id=forks[0])
        dump = auditor.dump([*runs.values(), *copies.values(), *forks])
        check_invariants(dump)
        for state, copy in copies.items():
            assert dump.runs[copy].header["status"] == state
            assert dump.runs[copy].newest_events
        assert len(dump.runs[forks[0]].outcomes) == 1


async def test_adopted_runs_keep_the_invariants(redis_url: str, auditor: Auditor) -> None:
    await adopted_runs_are_sound(redis_url, auditor)


@pytest.mark.parametrize("name", MUTATIONS)
async def test_a_bug_in_the_script_is_found(
    name: str, redis_url: str, auditor: Auditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = MUTATIONS[name]
    text = lua.source("adopt")
    assert text.count(old) == 1, "the mutation does not fit any more"
    seeded, source, digest = text.replace(old, new), lua.source, lua.digest
    sha = hashlib.sha1(seeded.encode(), usedforsecurity=False).hexdigest()
    monkeypatch.setattr(lua, "source", lambda n: seeded if n == "adopt" else source(n))
    monkeypatch.setattr(lua, "digest", lambda n: sha if n == "adopt" else digest(n))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await adopted_runs_are_sound(redis_url, auditor)
