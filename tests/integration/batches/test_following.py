"""Batches that follow others: rows of results, pages of them, and what happens in between."""

import asyncio
from collections.abc import Iterable
from datetime import timedelta

import orjson
import pytest
from support.deadlines import until
from support.runs.packed_records import repacked
from support.runs.stored_runs import (
    Bench,
    answered,
    failed,
    plain_agent,
    with_gateways,
    with_settings,
)

from stepfleet.orchestrator import Agent, AsyncBatch, AsyncFleet, ConfigurationError
from stepfleet.orchestrator.batches.following import FollowUpSubmission
from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.records.batch import Manifest, is_stalled
from stepfleet.orchestrator.store.batches.batches import Batches
from stepfleet.orchestrator.store.batches.upkeep import FollowUpIndex
from stepfleet.orchestrator.store.keys import AGENTS, FOLLOW_UPS
from stepfleet.worker.runtime import background

AGENT = plain_agent()
EDITOR = Agent("editor", model="openai:none", max_steps=2)


def lines(count: int) -> list[dict[str, str]]:
    return [{"id": f"q{n}", "input": f"What is {n}?", "tenant": "acme"} for n in range(count)]


async def do(desk: Bench, run_ids: Iterable[str], bad: Iterable[int] = ()) -> None:
    """Have runs answer, and those in `bad` fail."""
    for n, run_id in enumerate(run_ids):
        claim = await desk.claim(run_id)
        await desk.commit(claim, failed(claim) if n in bad else answered(claim, f"answer {{{n}}}"))


async def follow(desk: Bench) -> list[str]:
    """Do what a worker does for batches that follow others; return which were due."""
    opened = desk.opened
    await desk.keep_up()
    store = with_settings(opened, retention=60)
    due, _ = await store.follow_ups.due()
    for batch_id in due:
        await FollowUpSubmission(store).look(batch_id)
    return due


class Dying(FollowUpIndex):
    """The index of a worker that dies before its third page, and leaves everything as it is."""

    holds = 0

    async def hold(self, batch_id: str) -> bool:
        """Die at the fourth time: the first one is before the first page."""
        self.holds += 1
        if self.holds == 4:
            raise asyncio.CancelledError
        return await super().hold(batch_id)

    async def release(self, batch_id: str) -> None:
        """Do as usual, but not when dead."""
        if self.holds != 4:
            await super().release(batch_id)
        self.holds = 5


async def inputs(fleet: AsyncFleet, batch: AsyncBatch) -> dict[str, str]:
    """Return the inputs of a batch's runs by their lines' ids."""
    found = {}
    progress = await batch.progress()
    assert progress.sealed
    for run_id in batch.run_ids():
        try:
            run = await fleet.runs.show(run_id)
        except ConfigurationError:
            continue
        found[run.result().line_id or ""] = run.state.messages[-1].text
    assert len(found) == progress.total
    return found


async def test_each_completed_run_gets_a_run_with_its_result(
    fleet: AsyncFleet, desk: Bench
) -> None:
    first = await fleet.submit_batch(lines(5), AGENT)
    second = await first.then(EDITOR, "{id} / {input} / {output}", max_steps=7)
    progress = await second.progress()
    assert (progress.waits, progress.over, progress.follows) == (True, False, first.id)
    manifest = await with_settings(desk.opened, retention=60).batches.get(second.id)
    assert not is_stalled(manifest, progress.created + timedelta(days=1))
    assert await follow(desk) == [second.id]
    assert await follow(desk) == []  # it waits for a call
    await do(desk, first.run_ids(), bad=[2])
    assert (await first.progress()).next == (second.id,)
    assert second.id in await follow(desk)
    assert (await second.progress()).left_out == 1
    found = await inputs(fleet, second)
    assert found == {f"q{n}": f"q{n} / What is {n}? / answer {{{n}}}" for n in (0, 1, 3, 4)}
    result = await fleet.runs.result(next(iter(second.run_ids())))
    assert (result.tenant, result.max_iterations, result.batch_id) == ("acme", 7, second.id)
    again = await first.then(EDITOR, "{id} / {input} / {output}", max_steps=7)
    assert (again.id, again.is_new, second.is_new) == (second.id, False, True)
    # The first batch ends once more, by a retry: nothing is submitted twice.
    await first.retry()
    retried = list(first.run_ids())[2]
    claim = await desk.claim(retried)
    await desk.commit(claim, answered(claim, "late"))
    assert second.id not in await follow(desk)
    assert (await second.progress()).total == 4


@pytest.mark.parametrize("what", ["the agent", "a result", "the plan"])
async def test_what_only_a_newer_version_reads_is_left_to_its_workers(
    what: str, fleet: AsyncFleet, desk: Bench
) -> None:
    """OPS-04: nothing is refused for good; the batch before of another client is listed."""
    first = await fleet.submit_batch(lines(2), AGENT)
    second = await first.then(EDITOR)
    await do(desk, first.run_ids())
    keys, execute = desk.opened.keys, desk.opened.connection.execute
    plan = await execute("HGET", keys.manifest(second.id), "plan")
    key, name = {
        "the agent": (keys.of(AGENTS), orjson.loads(plan)["config"]),
        "a result": (keys.run(next(iter(first.run_ids()))), "slim"),
        "the plan": (keys.manifest(second.id), "plan"),
    }[what]
    stored = await execute("HGET", key, name)
    await execute("HSET", key, name, repacked(stored, field_of_a_later_release=1))
    with pytest.raises(SerializationError, match="field_of_a_later_release"):
        await follow(desk)
    assert await execute("ZSCORE", keys.of(FOLLOW_UPS), second.id) is not None
    assert not await execute("HEXISTS", keys.manifest(second.id), "refused")
    assert first.id in [one.batch_id for one in await fleet.batches.newest()]
    await execute("HSET", key, name, stored)
    await execute("ZADD", keys.of(FOLLOW_UPS), 0, second.id)
    assert second.id in await follow(desk)
    assert (await second.progress()).total == 2


async def test_pages_are_taken_until_one_run_is_left(fleet: AsyncFleet, desk: Bench) -> None:
    first = await fleet.submit_batch(lines(7), AGENT)
    last = await first.then(EDITOR, "{count}: {outputs}", page=3, until_one=True)
    await do(desk, first.run_ids(), bad=[6])  # the last page has no result
    await follow(desk)
    between_id = next(one for one in (await first.progress()).next if one != last.id)
    between = await fleet.batches.get(between_id)
    found = await inputs(fleet, between)
    assert set(found) == {"page 1", "page 2"}
    assert found["page 2"].startswith('3: [{"id":"q3","output":"answer {3}"},\n')
    progress = await last.progress()
    assert (progress.waits, progress.follows) == (True, between.id)
    assert (await between.progress()).next == (last.id,)
    await do(desk, list(between.run_ids())[:2])
    assert last.id in await follow(desk)
    assert set(await inputs(fleet, last)) == {"page 1"}
    await do(desk, last.run_ids())
    results = [one.output async for one in last.results(ordered=True)]
    assert results == ["answer {0}"]
    assert (await last.wait(60)).ok


@pytest.mark.parametrize("how", ["the batch", "its runs"])
async def test_results_that_were_removed_are_followed_by_nothing(
    how: str, fleet: AsyncFleet, desk: Bench
) -> None:
    first = await fleet.submit_batch(lines(2), AGENT)
    second = await first.then(EDITOR)
    await do(desk, first.run_ids())
    if how == "the batch":
        await fleet.runs.purge(batch=first.id)
    else:
        keys, connection = desk.opened.keys, desk.opened.connection
        await connection.execute_all(*(("DEL", keys.run(one)) for one in first.run_ids()))
    await follow(desk)
    refused = (await second.wait(60)).refused
    assert refused is not None
    assert "removed" in refused
    assert (await second.progress()).total == 0
    assert not (await second.progress()).ok


@pytest.mark.parametrize("how", ["failed", "cancelled", "nothing"])
async def test_what_cannot_begin_says_why_and_so_does_what_follows_it(
    how: str, fleet: AsyncFleet, desk: Bench
) -> None:
    first = await fleet.submit_batch(lines(3), AGENT)
    second = await first.then(EDITOR, after_failed="stop" if how == "failed" else "skip")
    third = await second.then(AGENT)
    if how == "cancelled":
        await first.cancel()
    else:
        await do(desk, first.run_ids(), bad=[1] if how == "failed" else range(3))
    await follow(desk)
    await follow(desk)
    why = {
        "failed": f"1 of 3 runs of batch {first.id} did not complete",
        "cancelled": f"batch {first.id} was cancelled",
        "nothing": f"no run of batch {first.id} completed",
    }[how]
    progress = await second.wait(60)
    assert (progress.refused, progress.ended, progress.ok, progress.total) == (why, True, False, 0)
    assert [one async for one in second.results(ordered=True)] == []
    refused = (await third.wait(60)).refused
    assert refused == f"batch {second.id} has no runs: {why}"
    if how == "failed":  # repaired, and asked for once more
        await first.retry()
        claim = await desk.claim(list(first.run_ids())[1])
        await desk.commit(claim, answered(claim))
        assert second.id not in await follow(desk)
        again = await first.then(EDITOR, after_failed="stop")
        assert (again.id, again.is_new) == (second.id, True)
        await follow(desk)
        assert (await second.progress()).total == 3


async def test_a_submission_goes_on_where_a_dead_worker_left_it(
    fleet: AsyncFleet, desk: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepfleet.orchestrator.batches.following.ROWS", 4)
    monkeypatch.setattr("stepfleet.orchestrator.store.batches.upkeep.TURN_MS", 600_000)
    first = await fleet.submit_batch(lines(20), AGENT)
    second = await first.then(EDITOR, "{outputs}", page=2)
    await do(desk, first.run_ids())
    await desk.keep_up()
    opened = desk.opened
    batches = with_settings(opened, retention=60).batches
    index = Dying(opened, batches)
    with pytest.raises(asyncio.CancelledError):
        await FollowUpSubmission(with_gateways(opened, batches=batches, follow_ups=index)).look(
            second.id
        )
    begun = await second.progress()
    assert begun.waits
    assert begun.submitted == 4
    assert not begun.submission_stalled
    assert not await index.take(second.id)
    await index.release(second.id)  # as its turn ends by itself
    await FollowUpSubmission(with_gateways(opened, batches=batches, follow_ups=index)).look(
        second.id
    )
    await FollowUpSubmission(with_gateways(opened, batches=batches, follow_ups=index)).look(
        second.id
    )
    progress = await second.progress()
    assert (progress.submitted, progress.total, progress.waits) == (10, 10, False)
    assert await index.due() == ([], False)


async def test_a_batch_that_waits_can_be_cancelled_and_paused(
    fleet: AsyncFleet, desk: Bench
) -> None:
    first = await fleet.submit_batch(lines(2), AGENT)
    second, third = await first.then(EDITOR), await first.then(EDITOR, "Sum: {output}")
    await second.cancel()
    await third.pause()
    assert (await second.wait(60)).ended
    await do(desk, first.run_ids())
    await follow(desk)
    assert (await second.progress()).submitted == 0
    for run_id in third.run_ids():
        await desk.refused(run_id)
    progress = await third.progress()
    assert (progress.submitted, progress.queued + progress.paused) == (2, 2)
    for run_id in (await fleet.batches.get(third.id)).run_ids():
        await desk.refused(run_id)
    assert (await third.progress()).paused == 2
    assert await third.resume() == 2


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"name": 5}, "name"),
        ({"page": 0}, "page"),
        ({"page": 1_001}, "page"),
        ({"page": True}, "page"),
        ({"until_one": True}, "until_one"),
        ({"until_one": True, "page": 1}, "until_one"),
        ({"after_failed": "run"}, "after_failed"),
        ({"input": "{outputs}"}, "input"),
        ({"input": "{output}", "page": 5}, "input"),
        ({"tenant": "a b"}, "tenant"),
        ({"max_steps": 0}, "max_steps"),
    ],
)
async def test_bad_options_are_refused_at_once(
    options: dict[str, object], field: str, fleet: AsyncFleet
) -> None:
    batch = await fleet.submit_batch(lines(1), AGENT, idempotency_key="bad options")
    with pytest.raises(ConfigurationError, match=f"'?{field}"):
        await batch.then(EDITOR, **options)  # type: ignore[arg-type]
    assert (await batch.progress()).next == ()


async def test_a_batch_is_followed_as_soon_as_its_last_run_has_ended(
    fleet: AsyncFleet, desk: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that commits the last run follows it; none has looked since the start."""
    for name in ("LOOK_SECONDS", "FOLLOW_SECONDS"):
        monkeypatch.setattr(background, name, 600.0)
    ended = asyncio.Event()
    keeping = asyncio.create_task(background.keep_batches(desk.opened, ended))
    try:
        await asyncio.sleep(0)  # it waits from here on
        first = await fleet.submit_batch(lines(3), AGENT)
        second = await first.then(EDITOR, "{output}")
        last = 0
        for run_id in first.run_ids():
            claim = await desk.claim(run_id)
            if (await desk.commit(claim, answered(claim, "yes"))).is_last:
                last += 1
                ended.set()
        shards = {desk.opened.keys.shard_of(run_id) for run_id in first.run_ids()}
        assert last == len(shards)

        async def has_begun() -> bool:
            return (await second.progress()).sealed

        await until(has_begun, within=60, what="the batch that follows")
        assert set(await inputs(fleet, second)) == {"q0", "q1", "q2"}
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_a_batch_is_not_forgotten_whose_client_stalls_before_its_record_is_there(
    fleet: AsyncFleet, desk: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MULTI-04: a worker that looks meanwhile finds nothing."""
    first = await fleet.submit_batch(lines(2), AGENT)
    opened, real = desk.opened, Batches.register
    batches = with_settings(opened, retention=60).batches
    index = FollowUpIndex(opened, batches)

    async def stalls(self: Batches, manifest: Manifest) -> None:
        if manifest.plan is not None:
            await FollowUpSubmission(with_gateways(opened, batches=batches, follow_ups=index)).look(
                manifest.batch_id
            )
        await real(self, manifest)

    monkeypatch.setattr(Batches, "register", stalls)
    second = await first.then(EDITOR)
    monkeypatch.setattr(Batches, "register", real)
    await do(desk, first.run_ids())
    await follow(desk)
    assert (await second.progress()).submitted == 2


async def test_a_repeated_then_wakes_a_batch_that_its_first_client_left_asleep(
    fleet: AsyncFleet, desk: Bench
) -> None:
    first = await fleet.submit_batch(lines(2), AGENT)
    second = await first.then(EDITOR)
    await desk.opened.connection.execute("DEL", desk.opened.keys.of(FOLLOW_UPS))
    await do(desk, first.run_ids())
    assert not (await first.then(EDITOR)).is_new
    await follow(desk)
    assert (await second.progress()).submitted == 2


async def test_a_worker_whose_turn_has_ended_refuses_no_batch(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """MULTI-04: another one has submitted it by then, behind repaired runs."""
    opened = desk.opened
    batches = with_settings(opened, retention=60).batches
    first = await fleet.submit_batch(lines(2), AGENT)
    second = await first.then(EDITOR, after_failed="stop")
    good, bad = first.run_ids()
    claim = await desk.claim(bad)
    await desk.commit(claim, failed(claim))
    await do(desk, [good])
    slow = FollowUpIndex(opened, batches)
    real = slow.hold

    async def stalls(name: str) -> bool:
        await opened.connection.execute("DEL", f"{opened.keys.manifest(name)}:turn")
        return await real(name)

    slow.hold = stalls  # type: ignore[method-assign]
    await FollowUpSubmission(with_gateways(opened, batches=batches, follow_ups=slow)).look(
        second.id
    )
    progress = await second.progress()
    assert (progress.waits, progress.refused) == (True, None)


async def test_a_cancelled_batch_that_waited_is_forgotten_behind_its_retention(
    fleet: AsyncFleet, desk: Bench
) -> None:
    first = await fleet.submit_batch(lines(1), AGENT)
    second, third = await first.then(EDITOR), await first.then(EDITOR, "Sum: {output}")
    await second.cancel()
    opened = desk.opened
    batches = with_settings(opened, retention=0).batches
    assert await batches.is_forgettable(await batches.get(second.id))
    assert not await batches.is_forgettable(await batches.get(third.id))


async def test_an_end_amid_a_look_at_its_batch_is_not_put_off(
    fleet: AsyncFleet, desk: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MULTI-04: what follows begins at once, not a minute later."""
    first = await fleet.submit_batch(lines(2), AGENT)
    second = await first.then(EDITOR)
    await follow(desk)
    early, late = first.run_ids()
    await do(desk, [early])
    real = Batches.is_over

    async def ends_behind_it(self: Batches, batch_id: str, manifest: Manifest | None) -> bool:
        over = await real(self, batch_id, manifest)
        if batch_id == first.id and not over:
            monkeypatch.setattr(Batches, "is_over", real)
            await do(desk, [late])
        return over

    monkeypatch.setattr(Batches, "is_over", ends_behind_it)
    await desk.keep_up()
    await follow(desk)
    assert (await second.progress()).submitted == 2
