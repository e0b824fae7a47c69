"""Runs that begin when others have ended: they wait without a slot, and get their results."""

import asyncio
from typing import Any

import pytest
from support.deadlines import until
from support.runs.stored_runs import Bench, answered, failed, plain_agent

from stepfleet.orchestrator import AsyncFleet, ConfigurationError, Message, RunStatus, StopReason
from stepfleet.orchestrator.protocol.claim import Refused, Work
from stepfleet.worker.runtime.links import LinkedRuns

AGENT = plain_agent()
BENCH = {"agent": AGENT, "lease": 600, "grace": 60}


async def answer(desk: Bench, run_id: str, text: str, *, good: bool = True) -> None:
    """Have a run end, and send its end to those who wait for it."""
    claim = await desk.claim(run_id)
    done = await desk.commit(claim, answered(claim, text) if good else failed(claim))
    if done.owes:
        await LinkedRuns(desk.opened).settle(run_id)


async def look(desk: Bench, run_id: str) -> bool:
    """Do what a worker does with a hint of a run that waits; return whether it may begin now."""
    refusal = await desk.steps.claim(Work(run_id, 0), desk.token())
    assert getattr(refusal, "why", None) is Refused.EARLY
    assert getattr(refusal, "owes", False)
    await LinkedRuns(desk.opened).dependents.attend(run_id)
    return "after" not in await desk.header(run_id)


async def rests(desk: Bench, run_id: str) -> bool:
    """Return whether nobody looks at the run before something happens, or an hour is over."""
    now = (await desk.opened.connection.now()).timestamp() * 1000
    due = await desk.due(run_id)
    return due is not None and due > now + 3_000_000


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
    assert await rests(desk, stops)
    await answer(desk, first, "good now")
    assert await look(desk, stops)
    assert await input_of(fleet, stops) == "good now"


async def test_a_run_that_has_not_begun_cannot_be_forked_or_checkpointed(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """Its input has places where results will be: no model is to see these."""
    first = await fleet.submit(AGENT, "a")
    second = await fleet.submit(AGENT, "Got: {output}", after=first)
    for refused in (fleet.history.fork(second), fleet.history.checkpoint(second)):
        with pytest.raises(ConfigurationError, match=f"run {second} has not begun"):
            await refused
    await answer(desk, first, "A")
    assert await look(desk, second)
    assert await input_of(fleet, await fleet.history.fork(second)) == "Got: A"
    assert (await fleet.history.checkpoint(second)).conversation_history[-1].text == "Got: A"


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
    assert await rests(desk, third)
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
        await until(fleet.runs.purge, what="the run removed")  # it ended a moment ago
    else:
        await look(desk, second)
        await fleet.runs.cancel(first)
        await LinkedRuns(desk.opened).settle(first)
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
    assert await desk.due(second) is None
    await LinkedRuns(desk.opened).dependents.attend(second)
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


async def test_a_worker_that_read_a_run_before_its_retry_does_not_let_it_begin(
    fleet: AsyncFleet, desk: Bench
) -> None:
    first = await fleet.submit(AGENT, "a")
    await answer(desk, first, "A")
    second = await fleet.submit(AGENT, "{output}", after=[first])
    waiting = LinkedRuns(desk.opened).dependents.waiting
    await waiting.arrived(second, first)
    late = await waiting.read(second)
    assert late is not None
    await fleet.runs.cancel(second)
    await fleet.runs.send(second, "and this")
    await waiting.arrived(second, first)
    assert not await waiting.begin(late, [Message.user("stale")])
    assert await look(desk, second)
    texts = [one.text for one in (await fleet.runs.show(second)).state.messages]
    assert texts[-2:] == ["A", "and this"]


async def test_two_workers_at_once_let_a_run_begin_once(fleet: AsyncFleet, desk: Bench) -> None:
    many = await asyncio.gather(*(fleet.submit(AGENT, f"{n}") for n in range(120)))
    last = await fleet.submit(AGENT, "{count}", after=many)
    for run_id in many[:60]:
        await answer(desk, run_id, "x")
    await look(desk, last)
    for run_id in many[60:]:
        await answer(desk, run_id, "x")
    queued = await desk.queued()
    links = [LinkedRuns(desk.opened).dependents for _ in range(5)]
    await asyncio.gather(*(one.attend(last) for one in links))
    assert await desk.queued() == queued + 1
    assert await input_of(fleet, last) == "120"


async def test_lines_of_a_file_wait_for_lines_above_them(fleet: AsyncFleet, desk: Bench) -> None:
    other = await fleet.submit(AGENT, "before the batch")
    lines = [
        {"id": "a", "input": "A {0}"},
        {"id": 2, "input": "B"},
        {"id": "c", "input": "{a} and {2}", "after": ["a", 2]},
        {"id": "d", "input": "{count} {output}", "after": "c", "after_failed": "run"},
    ]
    batch = await fleet.submit_batch(lines, AGENT, after=other)
    runs = list(batch.run_ids())
    for run_id in runs:
        assert not await look(desk, run_id)
    assert list(await fleet.runs.waits_for(runs[2])) == [*runs[:2], other]
    await answer(desk, other, "so it begins")
    for run_id, text in ((runs[0], "one"), (runs[1], "two")):
        assert await look(desk, run_id)
        assert await input_of(fleet, run_id) in ("A {0}", "B")
        await answer(desk, run_id, text)
    assert await look(desk, runs[2])
    assert await input_of(fleet, runs[2]) == "one and two"
    await fleet.runs.cancel(runs[2])
    await look(desk, runs[3])
    assert (await input_of(fleet, runs[3])).startswith("2 it ended as user_requested")
    again = await fleet.submit_batch(lines, AGENT, after=other)
    assert (again.id, again.is_new) == (batch.id, False)
    assert (await fleet.submit_batch(lines, AGENT)).id != batch.id


async def test_a_run_waits_for_a_line_that_is_still_to_be_created(
    fleet: AsyncFleet, desk: Bench
) -> None:
    lines = [{"id": "a", "input": "A"}, {"id": "b", "input": "{output}", "after": "a"}]
    batch = await fleet.submit_batch(lines, AGENT)
    first, second = batch.run_ids()
    manifest, connection = desk.opened.keys.manifest(batch.id), desk.opened.connection
    # As it is while another part of the file is slower.
    await connection.execute("HDEL", manifest, "sealed")
    await connection.execute("RENAME", desk.opened.keys.run(first), f"{first}:aside")
    assert not await look(desk, second)
    due = await desk.due(second)
    assert due is not None
    assert due < (await connection.now()).timestamp() * 1000 + 5_000
    assert await fleet.runs.waits_for(second) == {first: "unknown"}
    await connection.execute("RENAME", f"{first}:aside", desk.opened.keys.run(first))
    await connection.execute("HSET", manifest, "sealed", 1)
    assert not await look(desk, second)
    await answer(desk, first, "A")
    assert await look(desk, second)


async def test_in_an_abandoned_batch_nobody_waits_for_a_removed_run_of_others(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """Its submitter died: lines above may come still, a run of another batch may not."""
    other = await fleet.submit(AGENT, "A")
    lines = [{"id": "a", "input": "A"}, {"id": "b", "input": "B", "after": "a"}]
    batch = await fleet.submit_batch(lines, AGENT, after=other)
    first, second = batch.run_ids()
    manifest, connection = desk.opened.keys.manifest(batch.id), desk.opened.connection
    await connection.execute("HDEL", manifest, "sealed")
    await connection.execute("HSET", manifest, "submitting", 1)
    await connection.execute("RENAME", desk.opened.keys.run(other), f"{other}:aside")
    await look(desk, first)
    assert (await fleet.runs.result(first)).status is RunStatus.ERROR
    await connection.execute("RENAME", desk.opened.keys.run(first), f"{first}:aside")
    assert not await look(desk, second)
    assert not (await fleet.runs.result(second)).lifecycle.is_terminal


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (["nobody"], "line 2: field 'after': no good line above this one has the id 'nobody'"),
        (["b"], "line 2: field 'after': no good line above this one has the id 'b'"),
        (["c"], "line 2: field 'after': no good line above this one has the id 'c'"),
        (["a", "a"], "line 2: field 'after' has 'a' twice"),
        ([], "line 2: field 'after' names 0 runs"),
        ([None], "line 2: field 'after'"),
        ({"a": 1}, "line 2: field 'after' is an object"),
    ],
)
async def test_bad_orders_of_lines_are_refused_with_line_and_field(
    after: object, message: str, fleet: AsyncFleet
) -> None:
    lines = [
        {"id": "a", "input": "A"},
        {"id": "b", "input": "B", "after": after},
        {"id": "c", "input": "{output}", "after": "b"},
    ]
    with pytest.raises(ConfigurationError) as caught:
        await fleet.submit_batch(lines, AGENT)
    assert message in str(caught.value)
    assert "line 3: field 'after'" in str(caught.value)
    assert (await fleet.batches.newest()) == []


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        ({"after": ["6d0f3d0e-6f2c-5a0b-9c8e-0c6a6f7b1c55"]}, "{output}", "'after': no run has"),
        ({"after": []}, "x", "'after' names 0 runs"),
        ({"after": [str(n) for n in range(1_001)]}, "x", "'after' names 1,001 runs"),
        ({"after": [None]}, "x", "'after' has None"),
        ({"after": 5}, "x", "'after' has 5; name runs by their ids"),
        ({"after": {"a b}": "x"}}, "x", "'after' has the name"),
        ({"after": {"output": "x"}}, "x", "'after' has the name 'output'"),
        ({"after": "x", "after_failed": "skip"}, "x", "'after_failed' is 'skip'"),
        ({"after": "x", "delay": 5}, "x", "'delay'"),
        ({"after": "x"}, "{nobody}", "'input' names {nobody}; there are: {output}"),
        ({"after": "x"}, {"a": ["{output}"]}, "'input' is a dict and names {output}: only a text"),
        ({"after": {"b": "x"}}, {"a": "see {b}"}, "'input' is a dict and names {b}: only a text"),
        ({}, 5, "'input' is a number; write text, a list of messages, or a dict"),
        ({}, b"x", "'input' is an object; write text"),
    ],
)
async def test_bad_inputs_and_dependencies_are_refused_at_once(
    options: dict[str, Any], text: Any, message: str, fleet: AsyncFleet
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        await fleet.submit(AGENT, text, **options)
    assert message in str(caught.value)


async def test_data_without_a_known_place_is_sent_behind_others_as_it_is(
    fleet: AsyncFleet, desk: Bench
) -> None:
    first = await fleet.submit(AGENT, "a")
    second = await fleet.submit(AGENT, {"x": "{{output}} {nobody}"}, after=first)
    await answer(desk, first, "one")
    assert await look(desk, second)
    assert await input_of(fleet, second) == '{"x":"{{output}} {nobody}"}'
