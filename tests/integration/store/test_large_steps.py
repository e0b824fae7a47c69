"""Steps with thousands of tool calls, as earlier versions committed them, are taken up whole."""

from collections.abc import AsyncIterator

import pytest
from support.runs.stored_runs import Bench, bench, plain_agent

from stepfleet.orchestrator import (
    ErrorInfo,
    ErrorPolicy,
    ErrorType,
    LLMResponse,
    ToolCall,
    ToolCallRecord,
)
from stepfleet.orchestrator.protocol.attempt import Answered, Span
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.revision import revise

CALLS = 9_000


@pytest.fixture
async def desk(redis_url: str) -> AsyncIterator[Bench]:
    agent = plain_agent(error_policy=ErrorPolicy.stop_on_any_error())
    async with bench(redis_url, agent, lease=600.0, grace=60) as opened:
        yield opened


def records(claim: Claim) -> tuple[ToolCallRecord, ...]:
    """Return many finished calls and a failed one."""
    done = tuple(
        ToolCallRecord(tool_name="look", call_id=f"c{at}", result=at, timestamp=claim.now)
        for at in range(CALLS)
    )
    info = ErrorInfo(type=ErrorType.TOOL, code="TOOL_EXECUTION_ERROR", message="broken")
    return (*done[:-1], done[-1].model_copy(update={"is_error": True, "error": info}))


def attempt(claim: Claim) -> Answered:
    """Return the attempt of a step whose last call failed."""
    made = records(claim)
    calls = tuple(ToolCall(id=record.call_id, name="look") for record in made)
    response = LLMResponse(content="looking", tool_calls=calls)
    return Answered(Span(claim.now, 0.5), response, made, tuple("x" for _ in made), cost_usd=0.25)


async def test_a_retry_keeps_thousands_of_finished_calls(desk: Bench) -> None:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await desk.commit(claim, attempt(claim))
    stored = await desk.stored(run_id)
    assert stored.state.status.is_terminal
    revision = revise(stored.state, stored.log, stored.overrides, await desk.runs.now())
    answer = await desk.control.retry(stored, revision)
    assert answer.outcome == "retried"
    again = await desk.claim(run_id)
    assert len(again.journal.results) == CALLS - 1
    assert (await desk.counters())["status:in_progress"] == 1


async def test_thousands_of_starts_and_results_are_journaled_at_once(desk: Bench) -> None:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    made = attempt(claim)
    held = await desk.steps.journal(
        claim,
        0.5,
        response=made.response,
        started=tuple(range(CALLS)),
        results=dict(enumerate(made.records)),
    )
    assert held.ours
    key = f"{desk.opened.keys.run(run_id)}:journal"
    assert await desk.opened.connection.execute("HLEN", key) == 2 * CALLS + 1


async def test_the_status_of_a_run_with_a_large_state_is_reported_without_reading_it(
    desk: Bench,
) -> None:
    run_id = await desk.create(metadata={f"k{n}": ["abc", n] for n in range(10_000)})
    slim = (await desk.header(run_id))["slim"]
    assert len(slim) > 65_536
    assert (await desk.control.pause(run_id)).outcome == "paused"
    told, _ = await desk.runs.events(run_id)
    assert told[-1]["payload"]["status"] == "paused"
    assert told[-1]["payload"]["previous_status"] == "queued"
    assert told[-1]["execution_id"] == told[0]["execution_id"]
