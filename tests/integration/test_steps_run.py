"""Whole steps over a real Redis: journal, crashes, tools, cancels, errors in every phase."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from deadlines import until
from scripted_steps import Crash, Hands, Script, call, say
from stored_runs import Bench, bench

from stepfleet.orchestrator.agent import Agent, criteria_of
from stepfleet.orchestrator.continuation import when
from stepfleet.orchestrator.error_policy import ErrorPolicy
from stepfleet.orchestrator.errors import (
    ContextWindowError,
    ModelError,
    RateLimitError,
    StoreError,
)
from stepfleet.orchestrator.protocol.attempt import Interruption
from stepfleet.orchestrator.protocol.claim import Refused
from stepfleet.orchestrator.protocol.revision import further_turn, revise
from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.records.outcome import ContinuationDecision, StopReason
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.results import RunStatus
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import FinishReason, StepType
from stepfleet.orchestrator.tools import current_invocation, tool

Opened = Callable[..., AbstractAsyncContextManager[tuple[Bench, Hands, str]]]


@pytest.fixture
def opened(redis_url: str) -> Opened:
    @asynccontextmanager
    async def open_run(
        *answers: Any, tools: tuple[Any, ...] = (), **config: Any
    ) -> AsyncIterator[tuple[Bench, Hands, str]]:
        agent = Agent("scripted", model=Script(answers), tools=tools, **config)
        async with bench(redis_url, agent, lease=0.5, grace=60) as desk:
            yield desk, Hands(desk, agent), await desk.create()

    return open_run


def requests(hands: Hands) -> list[ModelRequest]:
    assert isinstance(hands.agent.llm, Script)
    return hands.agent.llm.requests


async def lease_runs_out(desk: Bench, run_id: str) -> None:
    async def expired() -> bool:
        now = (await desk.runs.now()).timestamp() * 1000
        return now > int((await desk.header(run_id))["lease"])

    await until(expired, within=5)


@tool(read_only=True)
def look(what: str) -> str:
    """Look something up."""
    return f"seen {what}"


@tool
def broken() -> str:
    """Fail."""
    message = "no luck"
    raise ValueError(message)


async def test_a_run_goes_from_tools_to_its_answer(opened: Opened) -> None:
    """RUN-06, RUN-09, RUN-10, RUN-12, RUN-13, RUN-14, MSG-11, MSG-14, TIME-12."""
    script = (call(("look", {"what": "a"}), text="I'll look it up"), say("found it"))
    async with opened(*script, tools=(look,)) as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
        result = stored.result()
    assert [step.step for step in result.steps] == [1, 2]
    assert [step.type for step in result.steps] == [
        StepType.TOOL_EXECUTION,
        StepType.FINAL_RESPONSE,
    ]
    assert result.status is RunStatus.COMPLETED
    assert result.output == "found it"
    assert result.tool_calls_by_name == {"look": 1}
    assert result.usage.total_tokens == 30
    assert result.usage.llm_calls == 2
    assert result.cost_usd == pytest.approx(0.03)
    assert [message.role for message in stored.state.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert stored.state.messages[1].text == "I'll look it up"
    assert stored.state.messages[2].text == "seen a"
    total = sum(step.duration_ms for step in result.steps) / 1000
    assert result.cumulative_execution_seconds == pytest.approx(total)


async def test_an_answer_that_was_journaled_is_not_paid_for_again(opened: Opened) -> None:
    """TOOL-26, DIST-08: after a crash between tools only the open tool runs."""
    effects: list[str] = []

    @tool
    def first() -> str:
        """Have an effect."""
        effects.append(current_invocation().idempotency_key)
        return "1"

    script = (call(("first", {}), ("look", {"what": "b"})), say("done"))
    async with opened(*script, tools=(first, look)) as (desk, hands, run_id):
        hands.crash_at = "after-journal"
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        assert effects == []
        await lease_runs_out(desk, run_id)
        crashing = Hands(desk, hands.agent, crash_at="tool-started")
        with pytest.raises(Crash):
            await crashing.step(run_id, 0)
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert len([one for one in requests(hands) if len(one.messages) == 1]) == 1
    assert result.status is RunStatus.ERROR
    assert result.steps[0].tool_calls[0].error is not None
    assert result.steps[0].tool_calls[0].error.code == "OUTCOME_UNKNOWN"
    assert [lost.kind for lost in result.lost_attempts] == ["crash", "crash"]
    assert not any(lost.ambiguous for lost in result.lost_attempts)


async def test_a_finished_tool_is_not_run_again_after_a_crash(opened: Opened) -> None:
    """TOOL-26: its result travelled with the start of the next one."""
    effects: list[str] = []

    @tool
    def effect() -> str:
        """Have an effect."""
        effects.append("done")
        return "effect"

    script = (call(("effect", {}), ("look", {"what": "b"})), say("done"))
    async with opened(*script, tools=(effect, look)) as (desk, hands, run_id):
        hands.crash_at = "tool-started:2"
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert effects == ["done"]
    assert result.success
    assert [one.result for one in result.steps[0].tool_calls] == ["effect", "seen b"]
    assert [one.repeated for one in result.steps[0].tool_calls] == [False, True]


async def test_a_status_hook_tells_what_became_of_a_lost_call(opened: Opened) -> None:
    def status(invocation: Any) -> str:
        return f"booked under {invocation.idempotency_key[:4]}"

    @tool(status=status)
    def book() -> str:
        """Book."""
        return "never reached again"

    async with opened(call(("book", {})), say("done"), tools=(book,)) as (desk, hands, run_id):
        hands.crash_at = "tool-started"
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.success
    assert str(result.steps[0].tool_calls[0].result).startswith("booked under")


@pytest.mark.parametrize(
    ("point", "committed", "calls"),
    [
        ("after-claim", 0, 2),
        ("before-journal", 0, 3),
        ("after-tools", 0, 2),
        ("before-commit", 0, 2),
        ("after-commit", 1, 2),
    ],
)
async def test_a_crash_at_any_point_loses_nothing(
    opened: Opened, point: str, committed: int, calls: int
) -> None:
    """DIST-08, CKPT-14: only a crash between reply and journal repeats a call, and is listed."""
    script = (call(("look", {"what": "a"})), say("done"))
    async with opened(*script, tools=(look,)) as (desk, hands, run_id):
        hands.crash_at = point
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        assert (await desk.stored(run_id)).step == committed
        if not committed:
            await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.success
    assert [step.step for step in result.steps] == [1, 2]
    assert len(requests(hands)) == calls
    ambiguous = [lost for lost in result.lost_attempts if lost.ambiguous]
    assert len(ambiguous) == (1 if point in ("after-claim", "before-journal") else 0)


async def test_a_run_that_ends_its_worker_again_and_again_is_given_up(opened: Opened) -> None:
    """Poison: exactly three crashes, then an error that names step and tool."""

    @tool(read_only=True)
    def bomb() -> str:
        """Explode."""
        return "not reached"

    async with opened(call(("bomb", {})), tools=(bomb,)) as (desk, hands, run_id):
        for _ in range(3):
            crashing = Hands(desk, hands.agent, crash_at="tool-started")
            with pytest.raises(Crash):
                await crashing.step(run_id, 0)
            await lease_runs_out(desk, run_id)
        await hands.step(run_id, 0)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.ERROR
    assert result.error is not None
    assert "step 1" in result.error
    assert "bomb" in result.error
    assert result.outcome is not None
    assert result.outcome.resolved_by == "PoisonLimit"


async def test_a_tool_error_reaches_the_model_and_ends_the_run_by_default(opened: Opened) -> None:
    """ERR-17, ERR-21, TOOL-11, TOOL-25, STATE-11."""
    async with opened(call(("broken", {})), tools=(broken,)) as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
        result = stored.result()
    assert result.stop_reason is StopReason.ERROR
    assert result.steps[0].type is StepType.ERROR
    assert result.error is not None
    assert "no luck" in result.error
    text = stored.state.messages[-1].text
    assert json.loads(text[text.index("{") :])["error"]["code"] == "TOOL_EXECUTION_ERROR"
    assert stored.state.last_error is not None


async def test_an_unknown_tool_is_answered_and_the_other_calls_run(opened: Opened) -> None:
    """TOOL-05, TOOL-07, TOOL-15: under a policy that goes on."""
    script = (call(("no_such", {}), ("look", {"what": "x"})), say("done"))
    policy = ErrorPolicy.retry_tool_errors(3)
    async with opened(*script, tools=(look,), error_policy=policy) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.success
    assert [one.is_error for one in result.steps[0].tool_calls] == [True, False]


async def test_retries_stop_at_the_policys_count_with_their_own_reason(opened: Opened) -> None:
    """ERR-09, ERR-13, ERR-19: retry, retry, stop."""
    policy = ErrorPolicy.retry_tool_errors(3)
    async with opened(call(("broken", {})), tools=(broken,), error_policy=policy) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.RETRY_LIMIT
    assert len(result.steps) == 3
    assert result.status is RunStatus.ERROR


async def test_an_endless_run_stops_at_its_step_limit_with_the_last_thought(
    opened: Opened,
) -> None:
    """CONT-27, RUN-15, RUN-30."""
    script = (call(("look", {"what": "a"}), text="still looking"),)
    async with opened(*script, tools=(look,), max_steps=3) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.STEPS_LIMIT
    assert result.status is RunStatus.MAX_ITERATIONS_REACHED
    assert result.output == "still looking"
    assert len(requests(hands)) == 3


async def test_one_step_longer_than_the_time_limit_stops_the_run_right_after_it(
    opened: Opened,
) -> None:
    """TIME-16, CONT-18, trap F3: the step's time is added before the criteria are evaluated."""

    async def slow(_: ModelRequest) -> LLMResponse:
        await asyncio.sleep(0.2)
        return call(("look", {"what": "a"}))

    async with opened(slow, tools=(look,), cumulative_timeout=0.1) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.TIME_LIMIT
    assert len(result.steps) == 1
    assert result.cumulative_execution_seconds >= 0.2


async def test_the_token_limit_counts_the_step_just_done(opened: Opened) -> None:
    """CONT-16"""
    script = (call(("look", {"what": "a"})),)
    async with opened(*script, tools=(look,), token_limit=30) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.TOKEN_LIMIT
    assert len(result.steps) == 2


async def test_a_configured_finish_reason_ends_the_run(opened: Opened) -> None:
    """CONT-19"""
    script = (say("cut off", finish_reason=FinishReason.LENGTH),)
    reasons = (FinishReason.LENGTH,)
    async with opened(*script, finish_reasons=reasons) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.FINISH_REASON
    assert result.success


async def test_a_criterion_that_raises_stops_the_run_with_an_explanation(opened: Opened) -> None:
    """CONT-26, ERR-25"""

    def raises(_: AgentState) -> ContinuationDecision:
        message = "criterion bug"
        raise RuntimeError(message)

    async with opened(call(("look", {"what": "a"})), tools=(look,), criteria=(when(raises),)) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.ERROR
    assert result.error is not None
    assert "criterion bug" in result.error
    assert requests(hands) == []


async def test_a_limit_that_is_exceeded_already_prevents_the_first_call(opened: Opened) -> None:
    """CONT-24"""

    def forbid(_: AgentState) -> ContinuationDecision:
        return ContinuationDecision.FORBID_CONTINUATION

    async with opened(say("never"), criteria=(when(forbid),)) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.GUARD
    assert result.steps == ()
    assert requests(hands) == []


async def test_a_permanent_model_failure_ends_the_run_at_once(opened: Opened) -> None:
    """RUN-16, ERR-25, ERR-31"""
    async with opened(ModelError("bad request")) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.ERROR
    assert result.steps[0].finish_reason is FinishReason.ERROR
    assert len(requests(hands)) == 1


async def test_a_rate_limit_waits_as_long_as_the_provider_asks(opened: Opened) -> None:
    """ERR-22: Retry-After is honoured and no slot is held."""
    async with opened(RateLimitError("slow down", retry_after=30.0)) as (desk, hands, run_id):
        report = await hands.step(run_id, 0)
        assert report.verdict is not None
        assert 30 <= report.verdict.delay <= 33
        assert len(hands.leases) == 0
        refusal = await desk.refused(run_id)
    assert refusal.why is Refused.EARLY
    assert int(refusal.detail) > 25_000


async def test_a_conversation_that_is_too_long_is_pruned_once(opened: Opened) -> None:
    """ERR-23, LLM-08: two calls, then the step's error."""
    failure = ContextWindowError("too long", limit=10)

    async def too_long_with_b(request: ModelRequest) -> LLMResponse:
        if any(message.text == "seen b" for message in request.messages):
            raise failure
        return call(("look", {"what": "b"}))

    script = (call(("look", {"what": "a"})), too_long_with_b, failure)
    async with opened(*script, tools=(look,)) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.ERROR
    assert len(requests(hands)) == 4
    assert [len(one.messages) for one in requests(hands)] == [1, 3, 5, 3]


async def test_an_exception_in_the_model_object_is_a_recorded_step(opened: Opened) -> None:
    """ERR-25"""

    async def explode(_: ModelRequest) -> LLMResponse:
        message = "bug in the adapter"
        raise KeyError(message)

    async with opened(explode) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.ERROR
    assert result.error is not None
    assert "bug in the adapter" in result.error
    assert len(result.steps) == 1


async def test_a_cancel_breaks_the_model_call_off(opened: Opened) -> None:
    """RUN-17, DIST-09: and the broken call is listed."""
    started = asyncio.Event()

    async def endless(_: ModelRequest) -> LLMResponse:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with opened(endless) as (desk, hands, run_id):
        step = asyncio.create_task(hands.step(run_id, 0))
        await started.wait()
        answer = await desk.control.cancel(await desk.stored(run_id), "enough")
        assert answer.word == "requested"
        lease = hands.leases.find(run_id)
        assert lease is not None
        lease.interrupt(Interruption.CANCELLED)
        await asyncio.wait_for(step, 5)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.USER_REQUESTED
    assert result.steps == ()
    assert [(lost.kind, lost.ambiguous) for lost in result.lost_attempts] == [("interrupted", True)]


async def test_a_cancel_between_tools_answers_every_call(opened: Opened) -> None:
    """MSG-18, DIST-09: no further tool starts, and no call stays without an answer."""
    ran: list[str] = []

    async with opened(say("x")) as (desk, _, _):

        @tool
        async def first() -> str:
            """Cancel the run that runs it."""
            ran.append("first")
            await desk.control.cancel(await desk.stored(current_invocation().run_id), "enough")
            return "1"

        @tool
        async def second() -> str:
            """Never run."""
            ran.append("second")
            return "2"

        script = Script((call(("first", {}), ("second", {})),))
        agent = Agent("scripted", model=script, tools=[first, second])
        desk.agent = agent
        run_id = await desk.create()
        await Hands(desk, agent).step(run_id, 0)
        stored = await desk.stored(run_id)
    assert ran == ["first"]
    assert stored.result().stop_reason is StopReason.USER_REQUESTED
    assert [message.tool_call_id for message in stored.state.messages if message.is_tool()] == [
        "c0",
        "c1",
    ]


async def test_a_step_that_is_handed_back_keeps_its_journal(opened: Opened) -> None:
    """A stopping worker gives its runs to others at once, with what was done already."""
    waiting = asyncio.Event()

    @tool(read_only=True)
    async def wait(what: str) -> str:
        """Wait."""
        waiting.set()
        if what == "long":
            await asyncio.Event().wait()
        return "waited"

    async with opened(call(("wait", {"what": "long"})), tools=(wait,)) as (desk, hands, run_id):
        step = asyncio.create_task(hands.step(run_id, 0))
        await waiting.wait()
        hands.leases.hand_back()
        await asyncio.wait_for(step, 5)
        heir = await desk.claim(run_id)
    assert heir.crashes == 0
    assert heir.journal.response is not None
    assert len(requests(hands)) == 1


async def test_parallel_tools_run_at_once_and_answer_in_call_order(opened: Opened) -> None:
    """TOOL-14, TIME-21: a step's time is its span, not the sum of its tools."""
    gate = asyncio.Barrier(3)

    @tool
    async def together(name: str) -> str:
        """Return when all three run."""
        await gate.wait()
        return name

    calls = call(*(("together", {"name": name}) for name in "abc"))
    async with opened(calls, say("done"), tools=(together,), parallel_tool_execution=True) as (
        desk,
        hands,
        run_id,
    ):
        await asyncio.wait_for(hands.finish(run_id), 10)
        result = (await desk.stored(run_id)).result()
    assert [one.result for one in result.steps[0].tool_calls] == ["a", "b", "c"]


async def test_a_worker_without_the_agent_leaves_the_run_to_others(opened: Opened) -> None:
    """DIST-14: the run waits, and another worker finishes it."""
    async with opened(say("done")) as (desk, hands, run_id):
        stranger = Agent("other", model=Script(()))
        report = await Hands(desk, stranger).step(run_id, 0)
        assert report.verdict is not None
        assert report.verdict.move == "retry"
        assert "scripted" in str(report.verdict.failure)

        async def taken() -> bool:
            await hands.step(run_id, 0)
            return (await desk.stored(run_id)).state.status.is_terminal

        await until(taken, within=5)
        assert (await desk.stored(run_id)).result().success


async def test_a_further_message_starts_a_new_execution_with_the_full_history(
    opened: Opened,
) -> None:
    """STATE-09, CONT-20, TIME-03, TIME-06, trap F13: fresh counters and clocks, same session."""
    script = (call(("look", {"what": "a"})), say("first answer"), say("second answer"))
    async with opened(*script, tools=(look,), max_steps=2) as (desk, hands, run_id):
        await hands.finish(run_id)
        before = await desk.stored(run_id)
        turn = further_turn(before.state, before.log, {}, await desk.runs.now())
        answer = await desk.control.retry(before, turn, (Message.user("and now?"),))
        assert (answer.word, answer.detail) == ("retried", "2")
        claim = await desk.claim(run_id, step=2, token="peek")
        assert claim.state.step_count == 0
        assert claim.state.usage.total_tokens == 0
        assert claim.state.info.cumulative_execution_seconds == 0
        assert claim.state.info.execution == 2
        assert [message.role for message in claim.state.messages] == [
            *("user", "assistant", "tool", "assistant"),
            "user",
        ]
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    result = stored.result()
    assert result.output == "second answer"
    assert [step.step for step in result.steps] == [1, 2, 3]
    assert stored.state.step_count == 1
    assert stored.state.session_steps == 3
    assert stored.state.session_usage.total_tokens == 45
    assert stored.state.info.started_at == before.state.info.started_at
    assert stored.state.info.execution_id != before.state.info.execution_id


async def test_a_failed_second_turn_is_retried_without_touching_the_first(opened: Opened) -> None:
    script = (say("first answer"), ModelError("bad"), say("never"))
    async with opened(*script) as (desk, hands, run_id):
        await hands.finish(run_id)
        first = await desk.stored(run_id)
        now = await desk.runs.now()
        turn = further_turn(first.state, first.log, {}, now)
        await desk.control.retry(first, turn, (Message.user("more"),))
        await hands.finish(run_id)
        failed = await desk.stored(run_id)
        assert failed.result().stop_reason is StopReason.ERROR
        revision = revise(failed.state, failed.log, {}, now)
    assert revision.step == 1
    assert revision.state.info.execution == 2
    assert revision.state.step_count == 0
    assert revision.state.session_steps == 1


async def test_a_tool_that_returns_a_huge_integer_is_a_step_like_any_other(
    opened: Opened,
) -> None:
    @tool
    def power(base: int) -> int:
        """Return a large number."""
        return base**70

    script = (call(("power", {"base": 2**64})), say("large"))
    async with opened(*script, tools=(power,)) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
        events, _ = await desk.runs.events(run_id)
    assert result.success
    assert result.steps[0].tool_calls[0].result == (2**64) ** 70
    assert result.lost_attempts == ()
    assert any(event["type"] == "agent.tool.completed" for event in events)


async def test_a_store_that_goes_away_during_a_step_fails_no_run(opened: Opened) -> None:
    """ERR-25, DIST-12: the attempt is lost, the run is not."""
    async with opened(call(("look", {"what": "a"})), say("done"), tools=(look,)) as (
        desk,
        hands,
        run_id,
    ):
        whole = desk.steps.journal

        async def away(*_: Any, **__: Any) -> None:
            message = "Redis cannot be reached"
            raise StoreError(message)

        desk.steps.journal = away  # type: ignore[assignment, method-assign]
        with pytest.raises(StoreError):
            await hands.step(run_id, 0)
        desk.steps.journal = whole  # type: ignore[method-assign]
        assert (await desk.stored(run_id)).state.status == "in_progress"
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        assert (await desk.stored(run_id)).result().success


async def test_a_cancel_that_meets_a_passing_failure_ends_the_run_at_once(
    opened: Opened,
) -> None:
    """CONT-22: it does not wait for the next attempt."""
    asked = asyncio.Event()
    go_on = asyncio.Event()

    async def fails_later(_: ModelRequest) -> LLMResponse:
        asked.set()
        await go_on.wait()
        message = "later"
        raise RateLimitError(message, retry_after=600.0)

    async with opened(fails_later) as (desk, hands, run_id):
        step = asyncio.create_task(hands.step(run_id, 0))
        await asked.wait()
        await desk.control.cancel(await desk.stored(run_id), "enough")
        go_on.set()
        await asyncio.wait_for(step, 5)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.USER_REQUESTED


async def test_paused_time_does_not_count_as_time_of_the_execution(opened: Opened) -> None:
    """CKPT-11, TIME-13: neither for the cumulative nor for the wall-clock limit."""
    script = (call(("look", {"what": "a"})), say("done"))
    async with opened(*script, tools=(look,), time_limit=60) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        await desk.control.pause(run_id)
        # An hour passes: what was stamped before lies an hour back.
        key = desk.opened.keys.run(run_id)
        for field in ("execution_started", "updated"):
            await desk.opened.connection.execute("HINCRBY", key, field, -3_600_000)
        await desk.control.resume(await desk.stored(run_id))
        await hands.finish(run_id)
        assert (await desk.stored(run_id)).result().success


async def test_an_old_failed_run_is_taken_up_with_a_fresh_clock(opened: Opened) -> None:
    async with opened(ModelError("bad"), time_limit=60) as (desk, hands, run_id):
        await hands.finish(run_id)
        key = desk.opened.keys.run(run_id)
        for field in ("created", "execution_started", "updated", "ended"):
            await desk.opened.connection.execute("HINCRBY", key, field, -3_600_000)
        stored = await desk.stored(run_id)
        revision = revise(stored.state, stored.log, {}, await desk.runs.now())
        outcome = criteria_of(stored.config).evaluate(revision.state)
    assert outcome.get_forbidding_criterion() is None


async def test_where_keys_are_sent_says_the_workers_code_and_not_the_store(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CONF-08: who can write to Redis cannot have a variable of the worker sent anywhere."""
    monkeypatch.setenv("SOME_SECRET", "sk-canary-123456")
    ours = Agent("scripted", model="openai:x", settings={"base_url": "http://127.0.0.1:9/v1"})
    theirs = Agent(
        "scripted",
        model="openai:x",
        settings={"base_url": "http://127.0.0.1:8/v1", "api_key_env": "SOME_SECRET"},
        model_attempts=1,
    )
    async with bench(redis_url, theirs) as desk:
        run_id = await desk.create()
        hands = Hands(desk, ours)
        await hands.step(run_id, 0)
        await hands.models.aclose()
        error = (await desk.stored(run_id)).result().error
    assert error is not None
    assert "127.0.0.1:9" in error
    assert "canary" not in error
