"""Equal permanent errors hold a batch: who ends, who waits, and what lets it go on."""

import asyncio
from typing import Any

import pytest
from support.runs.batch_requests import in_force, manifest_of, requests_of
from support.runs.stored_runs import Bench, answered, plain_agent

from stepfleet.orchestrator import AsyncFleet, ErrorInfo, ErrorType, ModelErrorCode
from stepfleet.orchestrator.agents.agent import criteria_of
from stepfleet.orchestrator.client.fleet import AsyncBatch
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.attempt import Failed, Span
from stepfleet.orchestrator.protocol.claim import Claim, Refused
from stepfleet.orchestrator.protocol.verdict import Facts, held, holding_error
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.worker.step import conclude

AGENT = plain_agent()
LINES = [{"id": f"q{n}", "input": f"question {n}"} for n in range(30)]
BENCH: dict[str, Any] = {"agent": AGENT}
MOST = 3


@pytest.fixture
async def batch(fleet: AsyncFleet) -> AsyncBatch:
    return await fleet.submit_batch(LINES, AGENT)


def error(code: str = "INVALID_API_KEY", message: str = "401: no such key", **more: Any) -> Any:
    return ErrorInfo(type=ErrorType.MODEL, code=code, message=message, **more)


async def fails(desk: Bench, claim: Claim, what: ErrorInfo | None = None) -> str:
    """Commit a failed call as a worker does; return the run's status."""
    attempt = Failed(Span(claim.now, 0.1), what or error())
    facts = Facts(claim.now)
    verdict, events = conclude(claim, attempt, criteria_of(claim.config), facts)
    found = holding_error(claim, attempt, verdict)
    assert found is not None
    given = (claim.batch_id or "", found, claim.config.model, claim.token, MOST)
    if number := await requests_of(desk).hold(*given):
        verdict, events = held(claim, number), Events([])
    return (await desk.steps.commit(claim, verdict, events)).status


async def claimed(desk: Bench, batch: AsyncBatch, rows: range) -> list[Claim]:
    return [await desk.claim(run_id_of(batch.id, row)) for row in rows]


async def test_so_many_runs_end_and_all_others_wait(desk: Bench, batch: AsyncBatch) -> None:
    claims = await claimed(desk, batch, range(10))
    statuses = await asyncio.gather(*(fails(desk, claim) for claim in claims))
    assert sorted(statuses) == ["failed"] * MOST + ["paused"] * 7
    progress = await batch.progress()
    assert (progress.failed, progress.paused, progress.queued) == (MOST, 7, 20)
    assert progress.held is not None
    assert (progress.held.runs, progress.held.message) == (MOST, "401: no such key")
    assert progress.held.cause.code == "INVALID_API_KEY"
    assert (await desk.refused(run_id_of(batch.id, 20))).why is Refused.PAUSED
    # A worker that looks after batches brings the request to all others.
    assert await requests_of(desk).go_on() == 1
    assert (await batch.progress()).paused == len(LINES) - MOST


async def test_a_resume_lets_all_of_them_go_on_at_the_same_step(
    desk: Bench, batch: AsyncBatch
) -> None:
    for claim in await claimed(desk, batch, range(6)):
        await fails(desk, claim)
    assert await batch.resume() == MOST  # the others had not been paused yet
    assert (await batch.progress()).held is None
    for row in range(MOST, len(LINES)):
        claim = await desk.claim(run_id_of(batch.id, row))
        assert (claim.step, claim.attempts) == (0, 0)
        await desk.commit(claim, answered(claim))
    progress = await batch.progress()
    assert (progress.completed, progress.failed) == (len(LINES) - MOST, MOST)


async def test_a_batch_whose_error_stays_is_held_again_after_a_resume(
    desk: Bench, batch: AsyncBatch
) -> None:
    for claim in await claimed(desk, batch, range(6)):
        await fails(desk, claim)
    await batch.resume()
    statuses = [await fails(desk, claim) for claim in await claimed(desk, batch, range(3, 9))]
    assert statuses == ["failed"] * MOST + ["paused"] * 3
    assert (await batch.progress()).held is not None


async def test_a_run_that_completes_between_them_begins_the_count_again(
    desk: Bench, batch: AsyncBatch
) -> None:
    claims = await claimed(desk, batch, range(8))
    for claim in claims[:2]:
        assert await fails(desk, claim) == "failed"
    await desk.commit(claims[2], answered(claims[2]))
    assert [await fails(desk, one) for one in claims[3:]] == ["failed"] * 3 + ["paused"] * 2


async def test_another_cause_begins_the_count_again(desk: Bench, batch: AsyncBatch) -> None:
    claims = await claimed(desk, batch, range(7))
    found = [error(), error(), error("MODEL_NOT_FOUND", "no such model"), error(), error()]
    assert [await fails(desk, *one) for one in zip(claims, found, strict=False)] == ["failed"] * 5
    assert (await batch.progress()).held is None
    assert await fails(desk, claims[5]) == "failed"
    assert await fails(desk, claims[6]) == "paused"


async def test_a_repeated_count_is_none_and_a_worker_that_dies_with_it_loses_no_hold(
    desk: Bench, batch: AsyncBatch
) -> None:
    """The reply was lost, or the worker has died before it put the request in force."""
    requests = requests_of(desk)
    for token in ("a", "b", "b", "b"):
        assert await requests.hold(batch.id, error(), "m", token, MOST) == 0
    assert (await batch.progress()).held is None
    assert await requests.hold(batch.id, error(), "m", "c", MOST) == 0
    assert (await batch.progress()).held is not None
    # As if whoever made it had died before anything else.
    await desk.opened.connection.execute("ZREM", keys.SWEEPS, batch.id)
    for shard in range(desk.opened.keys.shards):
        await desk.opened.connection.execute("HDEL", desk.opened.keys.flags(shard), f"b:{batch.id}")
    assert await requests.hold(batch.id, error(), "m", "d", MOST) > 0
    assert await requests.go_on() == 1
    assert (await batch.progress()).paused == len(LINES)


async def test_a_resume_that_comes_between_the_count_and_the_commit_is_not_undone(
    desk: Bench, batch: AsyncBatch
) -> None:
    """The run would be paused for good: no further request reaches it."""
    claims = await claimed(desk, batch, range(5))
    for claim in claims[:3]:
        await fails(desk, claim)
    late = claims[3]
    number = await requests_of(desk).hold(batch.id, error(), "m", late.token, MOST)
    assert number > 0
    await batch.resume()
    verdict = held(late, number)
    assert (await desk.steps.commit(late, verdict, Events([]))).status == "in_progress"
    await desk.claim(late.run_id)


async def test_a_cancel_ends_a_held_batch(desk: Bench, batch: AsyncBatch) -> None:
    for claim in await claimed(desk, batch, range(6)):
        await fails(desk, claim)
    assert await batch.cancel() == len(LINES) - MOST
    progress = await batch.progress()
    assert (progress.held, progress.open) == (None, 0)
    assert await requests_of(desk).hold(batch.id, error(), "m", "t", MOST) == 0


async def test_a_held_run_that_is_resumed_alone_waits_again(
    fleet: AsyncFleet, desk: Bench, batch: AsyncBatch
) -> None:
    claims = await claimed(desk, batch, range(5))
    for claim in claims:
        await fails(desk, claim)
    assert (await fleet.runs.resume(claims[4].run_id)).outcome == "resumed"
    again = await desk.claim(claims[4].run_id)
    assert await fails(desk, again) == "paused"


async def test_errors_of_one_input_and_transient_ones_hold_nothing(
    desk: Bench, batch: AsyncBatch
) -> None:
    (claim,) = await claimed(desk, batch, range(1))
    facts = Facts(claim.now)
    for what, transient in (
        (error(ModelErrorCode.CONTEXT_OVERFLOW), False),
        (error(ModelErrorCode.CONTENT_FILTER), False),
        (error("SERVER_ERROR", retryable=True), True),
        (ErrorInfo(type=ErrorType.TOOL, code="TOOL_EXECUTION_ERROR", message="broken"), False),
        (ErrorInfo(type=ErrorType.TIMEOUT, code="TIMEOUT_ERROR", message="late"), False),
    ):
        attempt = Failed(Span(claim.now, 0.1), what, transient)
        verdict, _ = conclude(claim, attempt, criteria_of(claim.config), facts)
        assert holding_error(claim, attempt, verdict) is None
    code = ErrorInfo(type=ErrorType.UNKNOWN, code="UNKNOWN_ERROR", message="ImportError: lamp")
    attempt = Failed(Span(claim.now, 0.1), code)
    verdict, _ = conclude(claim, attempt, criteria_of(claim.config), facts)
    assert holding_error(claim, attempt, verdict) == code


async def test_a_pause_by_hand_stays_one_that_no_error_caused(
    desk: Bench, batch: AsyncBatch
) -> None:
    await in_force(desk, batch, "pause")
    assert (await manifest_of(desk, batch)).held is None


RANDOM = ["zebra", "giraffe", "quokka", "lemur", "tapir", "okapi", "ibex", "vole", "newt", "shrew"]


@pytest.mark.parametrize(
    "message",
    ["{word} is no valid region", "RuntimeError: {word}", "the {word} of the {word} is not known"],
)
async def test_errors_that_quote_another_word_each_are_alike(
    desk: Bench, batch: AsyncBatch, message: str
) -> None:
    claims = await claimed(desk, batch, range(8))
    for word, claim in zip(RANDOM, claims, strict=False):
        await fails(desk, claim, error(message=message.format(word=word)))
    progress = await batch.progress()
    assert (progress.failed, progress.paused) == (MOST, 5)


async def test_errors_that_share_few_words_hold_nothing(desk: Bench, batch: AsyncBatch) -> None:
    messages = ("no such key", "the region is closed", "model m is retired", "bad tool schema")
    for row in range(12):
        claim = await desk.claim(run_id_of(batch.id, row))
        await fails(desk, claim, error(message=messages[row % 4]))
    progress = await batch.progress()
    assert (progress.failed, progress.paused, progress.held) == (12, 0, None)
