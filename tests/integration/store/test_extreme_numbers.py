"""Numbers that nobody should report, given to every script: each writes all of it or nothing."""

import asyncio
import dataclasses
import functools
import math
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from redis.exceptions import RedisError
from support.runs.heavy_calls import ONE, render, result_of
from support.runs.opened_runs import opened_run
from support.runs.stored_runs import (
    Bench,
    answered,
    bench,
    called,
    failed,
    plain_agent,
    with_settings,
)

from stepfleet.orchestrator import AgentException, ErrorPolicy, UsageStats
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.protocol.commit_events import events_of
from stepfleet.orchestrator.protocol.revision import revise
from stepfleet.orchestrator.protocol.verdict import Facts
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.orchestrator.records.usage import MOST_TOKENS, bounded_cost, bounded_usage, sum_usd
from stepfleet.orchestrator.store.feeds import FeedPosition
from stepfleet.orchestrator.store.runs.submission import ImportedRun, NewRun

WHOLE = [0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**30, 10**308]
BROKEN = [0.1, -0.5, 1e18, 1e308, -1e308, math.inf, -math.inf, math.nan]
counts = st.sampled_from([0, 1, -1, 2**53, 2**63 - 1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)
numbers = st.sampled_from([*WHOLE, *BROKEN]) | st.floats() | st.integers()
hostile = settings(
    max_examples=int(os.environ.get("EXTREME_NUMBERS", "12")),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # an example is small as it is
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
_REFUSED = (RedisError, AgentException, ValueError, OverflowError, TypeError)
"""What a binding may raise, as long as nothing was written."""


async def _contents(desk: Bench) -> dict[str, Any]:
    execute = desk.opened.connection.execute
    names = sorted(await execute("KEYS", "*"))
    client = desk.opened.connection.client
    found: dict[str, Any] = {}
    for name in names:
        if await client.pttl(name) >= 0:  # may be gone at the next look by itself
            continue
        match await client.type(name):
            case "hash":
                found[name] = await client.hgetall(name)
            case "zset":
                found[name] = await client.zrange(name, 0, -1, withscores=True)
            case "list":
                found[name] = await client.lrange(name, 0, -1)
            case "stream":
                found[name] = await client.xrange(name)
            case kind:
                found[name] = (kind, await client.get(name))
    return found


async def all_or_nothing(desk: Bench, ask: Callable[[], Awaitable[Any]]) -> bool:
    """Ask; where it is refused, nothing may have been written. Return whether it was taken."""
    before = await _contents(desk)
    try:
        await ask()
    except _REFUSED:
        assert await _contents(desk) == before
        return False
    return True


def tried(redis_url: str, body: Callable[[Bench], Awaitable[None]]) -> None:
    """Run a body on a store of its own, whose agent stops at any error."""

    async def run() -> None:
        agent = plain_agent(error_policy=ErrorPolicy.stop_on_any_error())
        async with bench(redis_url, agent, lease=600, grace=60) as desk:
            await desk.opened.connection.execute("FLUSHALL")
            await body(desk)

    asyncio.run(run())


def used(prompt: Any, completion: Any, total: Any) -> UsageStats:
    return UsageStats.model_construct(
        prompt_tokens=prompt, completion_tokens=completion, total_tokens=total, llm_calls=1
    )


@given(counts, counts, counts, st.sampled_from([*WHOLE, *BROKEN]))
@example(0, 0, 2**63 - 1, 1e300)
@hostile
def test_a_commit_and_its_retry_take_any_usage(
    redis_url: str, prompt: int, completion: int, total: int, usd: float
) -> None:
    """Two steps, so that sums of what is reported would overflow; then the failed one goes back."""

    async def body(desk: Bench) -> None:
        run_id = await desk.create(batch=f"b{prompt}")
        usage = used(prompt, completion, total)
        for step in range(2):
            claim = await desk.claim(run_id, step)
            attempt = called(claim, error=step == 1)
            response = attempt.response.model_copy(update={"usage": usage})
            attempt = dataclasses.replace(attempt, response=response, cost_usd=usd)
            verdict = desk.verdict(claim, attempt)
            events = events_of(claim, attempt, verdict, Facts(claim.now))

            commit = functools.partial(desk.steps.commit, claim, verdict, events)
            assert await all_or_nothing(desk, commit)
            header = await desk.header(run_id)
            assert header["step"] == str(step + 1)
            assert header["last_token"] == claim.token
            if header["status"] != "in_progress":  # so many tokens end the run at once
                break
        stored = await desk.stored(run_id)
        assert stored.state.status.is_terminal
        revision = revise(stored.state, stored.log, {}, await desk.runs.now())
        assert await all_or_nothing(desk, lambda: desk.control.retry(stored, revision))
        assert (await desk.header(run_id))["status"] == "in_progress"

    tried(redis_url, body)


@given(numbers, numbers, numbers)
@hostile
def test_times_and_steps_of_any_size_leave_a_run_whole(
    redis_url: str, lease: float, grace: float, retention: float
) -> None:
    async def body(desk: Bench) -> None:
        steps = with_settings(desk.opened, lease=lease, grace=grace, retention=retention).steps
        run_id = await desk.create()
        await all_or_nothing(desk, lambda: steps.claim(Work(run_id, lease), "x"))  # type: ignore[arg-type]
        await all_or_nothing(desk, lambda: steps.claim(Work(run_id, 0), "t"))
        with suppress(*_REFUSED):
            claim = await desk.claim(run_id, token="t")
            await all_or_nothing(desk, lambda: steps.journal(claim, grace, started=(0,)))
            for attempt in (failed(claim, transient=True), answered(claim)):
                verdict = dataclasses.replace(desk.verdict(claim, attempt), delay=grace)
                events = events_of(claim, attempt, verdict, Facts(claim.now))
                commit = functools.partial(steps.commit, claim, verdict, events)
                await all_or_nothing(desk, commit)

    tried(redis_url, body)


@given(numbers, numbers, numbers)
@hostile
def test_requests_of_clients_with_any_number_write_all_or_nothing(
    redis_url: str, grace: float, delay: float, retention: float
) -> None:
    async def body(desk: Bench) -> None:
        opened = desk.opened
        odd = with_settings(opened, grace=grace, retention=retention)
        config = await opened.configs.save(desk.agent.config)
        run = NewRun("r", "plain", config, (), 10, batch_id="b", row=retention, delay=delay)  # type: ignore[arg-type]
        await all_or_nothing(desk, lambda: opened.submission.create(run))
        run_id = await desk.create()
        with suppress(*_REFUSED):
            control = odd.control
            await control.pause(run_id)
            stored = await desk.stored(run_id)
            await all_or_nothing(desk, lambda: control.resume(stored))
            await all_or_nothing(desk, lambda: control.cancel(stored, "enough"))
            state = (await desk.stored(run_id)).state
            header = {"created": retention, "updated": delay, "execution_started": grace}
            copy = dataclasses.replace(run, run_id="copy")
            imported = ImportedRun(copy, state, retention, {}, header=header)  # type: ignore[arg-type]
            await all_or_nothing(desk, lambda: odd.submission.adopt(imported))

    tried(redis_url, body)


@given(numbers, numbers)
@hostile
def test_calls_that_wait_take_any_time(redis_url: str, lease: float, seconds: float) -> None:
    async def run() -> None:
        async with opened_run(redis_url, *ONE, tools=(render,)) as (desk, hands, run_id):
            await hands.step(run_id, 0)
            calls = desk.steps.calls
            calls.lease = lease
            hint = Work(run_id, 0, 0)
            await all_or_nothing(desk, lambda: calls.take(hint, "c"))
            calls.lease = 600
            taken = await calls.take(hint, "c")
            if not isinstance(taken, TakenCall):
                return
            calls.lease = lease
            await all_or_nothing(desk, lambda: calls.keep(hint, "c", seconds))
            done = result_of(taken)
            calls.grace = lease
            await all_or_nothing(desk, lambda: calls.deliver(taken, "scripted", done, seconds))
            await all_or_nothing(desk, lambda: calls.leave(hint, "c", delay=seconds))

    asyncio.run(run())


@given(numbers, numbers, st.sampled_from(WHOLE))
@hostile
def test_the_cache_and_the_feeds_take_any_number(
    redis_url: str, seconds: float, size: float, lost: int
) -> None:
    async def body(desk: Bench) -> None:
        entries = with_settings(desk.opened, cache_bytes=size).cache
        key = "a" * 64
        await all_or_nothing(desk, lambda: entries.keep(key, "m", "text", seconds))  # type: ignore[arg-type]
        feeds = desk.opened.feeds
        moved = {0: FeedPosition("1-1", 1)}
        for _ in range(2):
            await all_or_nothing(desk, lambda: feeds.own("o", "me", seconds, moved, lost))

    tried(redis_url, body)


@given(counts | st.floats() | st.booleans() | st.none() | st.text(max_size=3), st.floats())
@example(2**63 - 1, math.nan)
def test_usage_and_costs_are_bounded_where_they_are_read(value: Any, usd: float) -> None:
    usage = bounded_usage(used(value, 5, value))
    assert usage is not None
    assert all(type(n) is int and 0 <= n <= 2 * MOST_TOKENS for n in usage.to_dict().values())
    assert 0 <= bounded_cost(usd) < math.inf


def test_costs_and_their_sums_are_billionths_without_errors_of_fractions() -> None:
    assert bounded_cost(0.000052799999999999996) == 0.0000528
    assert sum_usd(0.1, 0.2) == 0.3
    assert sum_usd(*[0.0000001] * 7) == 0.0000007


@pytest.mark.parametrize("count", [0, 7, MOST_TOKENS])
def test_usage_within_bounds_stays_as_it_is(count: int) -> None:
    usage = used(count, 0, count)
    assert bounded_usage(usage) is usage
