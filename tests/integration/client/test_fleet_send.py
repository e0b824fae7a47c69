"""A further message to a run: a new execution on the same session, against a real Redis."""

import asyncio
from typing import Any

import pytest
from support.runs.stored_runs import Bench, answered, called, failed, plain_agent

from stepfleet.orchestrator import (
    AsyncFleet,
    ConfigurationError,
    ControlOutcome,
    ControlResult,
    ErrorPolicy,
    Fleet,
    Lifecycle,
)
from stepfleet.orchestrator.protocol.attempt import Attempt

AGENT = plain_agent(max_steps=2, error_policy=ErrorPolicy.stop_on_any_error())
UNKNOWN = "00000000-0000-0000-0000-000000000000"


BENCH: dict[str, Any] = {"agent": AGENT}


async def ended(state: str, fleet: AsyncFleet, desk: Bench) -> str:
    """Return a run that has ended like that."""
    run_id = await desk.create()
    if state == "cancelled":
        await fleet.runs.cancel(run_id)
        return run_id
    for step in range(2 if state == "stopped" else 1):
        claim = await desk.claim(run_id, step)
        made: Attempt = answered(claim) if state == "completed" else called(claim)
        await desk.commit(claim, failed(claim) if state == "failed" else made)
    assert (await fleet.runs.result(run_id)).lifecycle.value == state
    return run_id


@pytest.mark.parametrize(
    ("state", "step"), [("completed", 1), ("failed", 1), ("stopped", 2), ("cancelled", 0)]
)
async def test_an_ended_run_goes_on_with_the_message_however_it_ended(
    fleet: AsyncFleet, desk: Bench, state: str, step: int
) -> None:
    """STATE-09: history and totals stay; counters, limits and the reason to stop start anew."""
    run_id = await ended(state, fleet, desk)
    before = await fleet.runs.show(run_id)

    assert await fleet.runs.send(run_id, "and now?") == ControlResult(
        ControlOutcome.SENT, str(step)
    )

    claim = await desk.claim(run_id, step)
    assert claim.state.messages[:-1] == before.state.messages
    assert claim.state.messages[-1].text == "and now?"
    assert claim.state.step_count == 0
    assert claim.state.usage.total_tokens == 0
    assert claim.state.session_usage == before.state.session_usage
    assert claim.state.failures.consecutive_failures == 0
    await desk.commit(claim, answered(claim, "this"))
    after = await fleet.runs.result(run_id)
    assert (after.lifecycle, after.output, after.error) == (Lifecycle.COMPLETED, "this", None)
    counted = await desk.counters()
    assert counted["status:completed"] == counted["total"] == 1
    assert counted.get("open", 0) == 0


@pytest.mark.parametrize("state", ["queued", "held", "paused"])
async def test_a_run_that_has_not_ended_takes_no_message(
    fleet: AsyncFleet, desk: Bench, state: str
) -> None:
    run_id = await desk.create()
    if state == "held":
        await desk.claim(run_id)
    if state == "paused":
        await fleet.runs.pause(run_id)

    with pytest.raises(ConfigurationError, match=r"has not ended.*cancel it first"):
        await fleet.runs.send(run_id, "and now?")

    assert [message.text for message in (await fleet.runs.show(run_id)).state.messages[1:]] == [
        "hello"
    ]


@pytest.mark.parametrize(
    ("run_id", "text", "said"),
    [
        (UNKNOWN, "more", f"no run has the id '{UNKNOWN}'"),
        (None, " \n", "field 'text' is empty"),
        (None, "x" * 1_048_577, "the limit is 1,048,576"),
    ],
)
async def test_a_message_that_cannot_be_sent_is_reported(
    fleet: AsyncFleet, desk: Bench, run_id: str | None, text: str, said: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        await fleet.runs.send(run_id or await ended("completed", fleet, desk), text)
    assert said in caught.value.message


async def test_changes_to_the_configuration_hold_from_the_message_on(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await ended("stopped", fleet, desk)

    await fleet.runs.send(run_id, "and now?", max_steps=7)
    with pytest.raises(ConfigurationError, match="has not ended"):
        await fleet.runs.send(run_id, "again", max_steps=9)

    assert (await desk.claim(run_id, 2)).config.max_steps == 7


async def test_a_wrong_change_leaves_the_run_as_it_is(fleet: AsyncFleet, desk: Bench) -> None:
    run_id = await ended("completed", fleet, desk)
    with pytest.raises(ConfigurationError, match="field 'max_steps'"):
        await fleet.runs.send(run_id, "and now?", max_steps=0)
    assert (await fleet.runs.result(run_id)).lifecycle is Lifecycle.COMPLETED


async def test_messages_that_no_step_has_answered_yet_are_kept(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """The question of a run that was cancelled before its first step is not replaced."""
    run_id = await ended("cancelled", fleet, desk)
    await fleet.runs.send(run_id, "second")
    await fleet.runs.cancel(run_id)

    await fleet.runs.send(run_id, "third")

    claim = await desk.claim(run_id)
    said = [message.text for message in claim.state.messages if message.is_user()]
    assert said == ["hello", "second", "third"]


async def test_of_two_messages_at_once_one_is_taken_and_the_other_is_reported(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await ended("completed", fleet, desk)
    sends = (fleet.runs.send(run_id, f"message {n}") for n in range(4))

    answers = await asyncio.gather(*sends, return_exceptions=True)

    taken = [n for n, answer in enumerate(answers) if isinstance(answer, ControlResult)]
    assert len(taken) == 1
    told = [answer for answer in answers if isinstance(answer, ConfigurationError)]
    assert len(told) == 3
    assert all("has not ended" in error.message for error in told)
    claim = await desk.claim(run_id, 1)
    assert claim.state.messages[-1].text == f"message {taken[0]}"
    assert len([message for message in claim.state.messages if message.is_user()]) == 2


async def test_retrying_a_turn_that_made_no_step_leaves_the_turn_before_it_alone(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """The failed step belongs to an execution that has ended; its message was not answered."""
    run_id = await ended("failed", fleet, desk)
    await fleet.runs.send(run_id, "once more")
    await fleet.runs.cancel(run_id)

    assert await fleet.runs.retry(run_id) == ControlResult(ControlOutcome.RETRIED, "1")

    claim = await desk.claim(run_id, 1)
    assert claim.state.info.execution == 2
    assert claim.state.messages[-1].text == "once more"
    await desk.commit(claim, answered(claim))
    assert [step.step for step in (await fleet.runs.result(run_id)).steps] == [1, 2]


def test_the_plain_fleet_sends_as_well(redis_url: str) -> None:
    with Fleet(redis_url) as fleet:
        run_id = fleet.submit(AGENT, "hello")
        fleet.runs.cancel(run_id)
        assert fleet.runs.send(run_id, "more", max_steps=3) == ControlResult(
            ControlOutcome.SENT, "0"
        )
        assert fleet.runs.result(run_id).max_iterations == 3
