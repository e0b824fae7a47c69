"""Runs that begin when others have ended: they wait without a slot, and get their results."""

import asyncio
from typing import Any

import pytest
from support.runs.stored_runs import Bench, answered, failed, plain_agent

from stepfleet.orchestrator import AsyncFleet, ConfigurationError, RunStatus, StopReason
from stepfleet.orchestrator.protocol.claim import Refused, StepHint
from stepfleet.worker.runtime.links import LinkedRuns

AGENT = plain_agent()
BENCH = {"agent": AGENT, "lease": 600, "grace": 60}


async def answer(desk: Bench, run_id: str, text: str, *, good: bool = True) -> None:
    """Have a run end, and send its end to those who wait for it."""
    claim = await desk.claim(run_id)
    done = await desk.commit(claim, answered(claim, text) if good else failed(claim))
    if done.owes:
        await LinkedRuns(desk.opened, desk.steps).settle(run_id)


async def look(desk: Bench, run_id: str) -> bool:
    """Do what a worker does with a hint of a run that waits; return whether it may begin now."""
    refusal = await desk.steps.claim(StepHint(run_id, 0), desk.token())
    assert getattr(refusal, "why", None) is Refused.EARLY
    assert getattr(refusal, "owes", False)
    await LinkedRuns(desk.opened, desk.steps).dependents.attend(run_id)
    return "after" not in await desk.header(run_id)


async def input_of(fleet: AsyncFleet, run_id: str) -> str:
    return (await fleet.runs.show(run_id)).state.messages[-1].text


async def test_a_run_begins_when_all_before_it_have_ended(fleet: AsyncFleet, desk: Bench) -> None:
    first, second = [await fleet.submit(AGENT, text) for text in ("a", "b")]
    third = await fleet.submit(
        AGENT, "{facts} and {style}: {count}, {outputs}", after={"facts": first, "style": second}
    )
    assert not await look(desk, third)
    queued = await desk.queued()
    await answer(desk, first, "{style} {{0}}")
    assert await desk.queued() == queued  # no message before the last one
    await answer(desk, second, "B")
    assert await desk.queued() == queued + 1
    assert await look(desk, third)
    expected = (
        "{style} {{0}} and B: 2, "
        f'[{{"id":"{first}","output":"{{style}} {{{{0}}}}"}},\n{{"id":"{second}","output":"B"}}]'
    )
    assert await input_of(fleet, third) == expected
    await answer(desk, third, "done")
    assert (await fleet.runs.result(third)).output == "done"


async def test_a_chain_of_runs_that_have_ended_already(fleet: AsyncFleet, desk: Bench) -> None:
    first = await fleet.submit(AGENT, "a")
    await answer(desk, first, "one")
    second = await fleet.submit(AGENT, "After {output}", after=await fleet.runs.result(first))
    third = await fleet.submit(AGENT, [{"role": "user", "content": "{x}"}], after=[second, second])
    assert await look(desk, second)
    assert await input_of(fleet, second) == "After one"
    assert not await look(desk, third)
    await answer(desk, second, "two")
    assert await look(desk, third)
    assert await input_of(fleet, third) == "{x}"


async def test_a_failed_run_before_it_ends_a_run_and_a_retry_waits_anew(
    fleet: AsyncFleet, desk: Bench
) -> None:
    first = await fleet.submit(AGENT, "a")
    stops = await fleet.submit(AGENT, "{output}", after=[first])
    goes_on = await fleet.submit(AGENT, "Got: {output}", after=[first], after_failed="run")
    for run_id in (stops, goes_on):
        assert not await look(desk, run_id)
    await answer(desk, first, "", good=False)
    assert not await look(desk, stops)
    assert await look(desk, goes_on)
    assert (await input_of(fleet, goes_on)).startswith("Got: it ended as error")
    result = await fleet.runs.result(stops)
    assert (result.status, result.stop_reason) == (RunStatus.ERROR, StopReason.ERROR)
    assert result.error is not None
    assert result.error.startswith(f"dependency_failed: run {first}: it ended as error")
    assert result.outcome is not None
    assert result.outcome.resolved_by == "Dependency"
    assert (result.steps, result.usage.total_tokens) == ((), 0)
    await fleet.runs.retry(stops)
    assert not (await fleet.runs.result(stops)).lifecycle.is_terminal
    await fleet.runs.retry(first)
    assert not await look(desk, stops)  # it waits for the retried one
    await answer(desk, first, "good now")
    assert await look(desk, stops)
    assert await input_of(fleet, stops) == "good now"


async def test_a_run_that_is_retried_before_the_last_one_ends_counts_with_its_new_end(
    fleet: AsyncFleet, desk: Bench
) -> None:
    first, second = [await fleet.submit(AGENT, text) for text in ("a", "b")]
    third = await fleet.submit(AGENT, "{outputs}", after=[first, second])
    await look(desk, third)
    await answer(desk, first, "", good=False)
    await fleet.runs.retry(first)
    await answer(desk, second, "B")
    assert not await look(desk, third)
    await answer(desk, first, "A")
    assert await look(desk, third)
    assert '"output":"A"' in await input_of(fleet, third)


@pytest.mark.parametrize("how", ["cancel", "purge"])
async def test_what_is_cancelled_or_removed_has_failed(
    how: str, fleet: AsyncFleet, desk: Bench
) -> None:
    first = await fleet.submit(AGENT, "a")
    second = await fleet.submit(AGENT, "{output}", after=[first])
    if how == "purge":
        await answer(desk, first, "a")
        assert await fleet.runs.purge() >= 1
    else:
        await look(desk, second)
        await fleet.runs.cancel(first)
        await LinkedRuns(desk.opened, desk.steps).settle(first)
    await look(desk, second)
    error = (await fleet.runs.result(second)).error
    assert error is not None
    assert {"cancel": "user_requested", "purge": "was removed"}[how] in error


async def test_a_run_that_waits_can_be_paused_resumed_and_cancelled(
    fleet: AsyncFleet, desk: Bench
) -> None:
    first = await fleet.submit(AGENT, "a")
    second = await fleet.submit(AGENT, "{output}", after=[first])
    await look(desk, second)
    await fleet.runs.pause(second)
    await answer(desk, first, "A")
    await LinkedRuns(desk.opened, desk.steps).dependents.attend(second)
    assert "after" in await desk.header(second)
    await fleet.runs.resume(second)
    assert await look(desk, second)
    assert await input_of(fleet, second) == "A"
    third = await fleet.submit(AGENT, "{output}", after=[second])
    await look(desk, third)
    await fleet.runs.cancel(third)
    await answer(desk, second, "B")
    result = await fleet.runs.result(third)
    assert result.status is RunStatus.CANCELLED
    await fleet.runs.retry(third)
    assert await look(desk, third)
    assert await input_of(fleet, third) == "B"


async def test_two_workers_at_once_let_a_run_begin_once(fleet: AsyncFleet, desk: Bench) -> None:
    many = await asyncio.gather(*(fleet.submit(AGENT, f"{n}") for n in range(120)))
    last = await fleet.submit(AGENT, "{count}", after=many)
    for run_id in many[:60]:
        await answer(desk, run_id, "x")
    await look(desk, last)
    for run_id in many[60:]:
        await answer(desk, run_id, "x")
    queued = await desk.queued()
    links = [LinkedRuns(desk.opened, desk.steps).dependents for _ in range(5)]
    await asyncio.gather(*(one.attend(last) for one in links))
    assert await desk.queued() == queued + 1
    assert await input_of(fleet, last) == "120"


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        ({"after": ["6d0f3d0e-6f2c-5a0b-9c8e-0c6a6f7b1c55"]}, "{output}", "'after': no run has"),
        ({"after": []}, "x", "'after' names 0 runs"),
        ({"after": [str(n) for n in range(1_001)]}, "x", "'after' names 1,001 runs"),
        ({"after": [None]}, "x", "'after' has None"),
        ({"after": {"a b}": "x"}}, "x", "'after' has the name"),
        ({"after": {"output": "x"}}, "x", "'after' has the name 'output'"),
        ({"after": "x", "after_failed": "skip"}, "x", "'after_failed' is 'skip'"),
        ({"after": "x", "delay": 5}, "x", "'delay'"),
        ({"after": "x"}, "{nobody}", "'input' names {nobody}; there are: {output}"),
    ],
)
async def test_bad_dependencies_are_refused_at_once(
    options: dict[str, Any], text: str, message: str, fleet: AsyncFleet
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        await fleet.submit(AGENT, text, **options)
    assert message in str(caught.value)
