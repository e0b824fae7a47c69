"""Whole steps over a real Redis: answers, tools, limits, further turns, paused time."""

import asyncio
from datetime import timedelta

import pytest
from support.deadlines import until
from support.runs.opened_runs import Opened, lease_runs_out, opened_run
from support.runs.scripted_steps import Hands, Script, call, requests, say
from support.runs.stored_runs import bench
from support.runs.tools import look

from stepfleet.orchestrator import (
    Agent,
    AgentState,
    ContinuationDecision,
    ErrorPolicy,
    FinishReason,
    LLMResponse,
    Message,
    ModelRequest,
    RunStatus,
    StopReason,
    ToolCall,
    tool,
    when,
)
from stepfleet.orchestrator.agents.agent import criteria_of
from stepfleet.orchestrator.errors import (
    ModelError,
)
from stepfleet.orchestrator.protocol.revision import further_turn, revise
from stepfleet.orchestrator.records.steps import StepType


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
    assert [step.thought for step in result.steps] == ["I'll look it up", "found it"]
    assert [step.finish_reason for step in result.steps] == ["tool_calls", "stop"]
    assert [step.has_tool_calls for step in result.steps] == [True, False]
    assert [step.usage and step.usage.total_tokens for step in result.steps] == [15, 15]
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


@pytest.mark.parametrize("parallel", [False, True])
async def test_an_unknown_tool_is_answered_and_the_other_calls_run(
    opened: Opened, parallel: bool
) -> None:
    """TOOL-05, TOOL-07, TOOL-15: so are a call that cannot be read, and a tool that fails."""

    @tool
    def fails() -> str:
        """Fail."""
        raise ValueError("no luck")

    unread = ToolCall(id="c9", name="look", error="its arguments are no JSON")
    asked = call(("look", {"what": "x"}), ("no_such", {}), ("fails", {}), ("look", {"what": "y"}))
    asked = asked.model_copy(update={"tool_calls": (*(asked.tool_calls or ()), unread)})
    async with opened(
        *(asked, say("done")),
        tools=(look, fails),
        error_policy=ErrorPolicy.ignore_tool_errors(),
        parallel_tool_execution=parallel,
    ) as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    result = stored.result()
    assert result.success
    records = result.steps[0].tool_calls
    assert [one.is_error for one in records] == [False, True, True, False, True]
    assert [one.result for one in records] == ["seen x", None, None, "seen y", None]
    answers = stored.state.messages[2:7]
    assert [one.tool_call_id for one in answers] == ["c0", "c1", "c2", "c3", "c9"]
    said = ("seen x", "tool 'no_such' does not exist", "ValueError: no luck", "seen y", "no JSON")
    for answer, part in zip(answers, said, strict=True):
        assert answer.is_tool()
        assert part in answer.text


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
    assert len(requests(hands)) == len(result.steps) == 3


async def test_one_step_longer_than_the_time_limit_stops_the_run_right_after_it(
    opened: Opened,
) -> None:
    """TIME-16, CONT-18, trap F3: the step's time is added before the criteria are evaluated."""

    async def slow(_: ModelRequest) -> LLMResponse:
        await asyncio.sleep(0.2)  # a slow model: longer than the limit
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
        await asyncio.wait_for(hands.finish(run_id), 60)
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

        await until(taken, within=60)
        assert (await desk.stored(run_id)).result().success


async def test_a_further_message_starts_a_new_execution_with_the_full_history(
    opened: Opened,
) -> None:
    """STATE-09, CONT-20, TIME-03, TIME-06, trap F13: fresh counters and clocks, same session."""
    script = (call(("look", {"what": "a"})), say("first answer"), say("second answer"))
    async with opened(*script, tools=(look,), max_steps=2) as (desk, hands, _):
        run_id = await desk.create(metadata={"ticket": 7})
        await hands.finish(run_id)
        # The turn began an hour ago.
        key = desk.opened.keys.run(run_id)
        await desk.opened.connection.execute("HINCRBY", key, "execution_started", -3_600_000)
        before = await desk.stored(run_id)
        assert before.state.current_step is not None
        turn = further_turn(before.state, before.log, {}, await desk.runs.now())
        answer = await desk.control.retry(before, turn, (Message.user("and now?"),))
        assert (answer.outcome, answer.detail) == ("retried", "2")
        claim = await desk.claim(run_id, step=2, token="peek")
        assert claim.state.step_count == 0
        assert claim.state.usage.total_tokens == 0
        assert claim.state.info.cumulative_execution_seconds == 0
        assert claim.state.info.execution == 2
        assert claim.state.current_step is None
        clocks = [one.info.execution_started_at for one in (before.state, claim.state)]
        assert clocks[0]
        assert clocks[1]
        assert clocks[1] - clocks[0] > timedelta(minutes=30)
        assert (claim.state.agent_id, claim.state.metadata) == (run_id, {"ticket": 7})
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


async def test_a_run_that_had_its_answer_is_completed_by_a_retry_without_a_call(
    redis_url: str,
) -> None:
    """CONT-33: nothing is sent after the answer; so end runs that an earlier release stopped."""
    at_first = [ContinuationDecision.ALLOW_CONTINUATION, ContinuationDecision.FORBID_CONTINUATION]
    left = iter(at_first)
    guard = when(lambda _: next(left, ContinuationDecision.ALLOW_CONTINUATION))
    async with opened_run(redis_url, say("done"), criteria=(guard,)) as (desk, hands, run_id):
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
        assert stored.result().stop_reason is StopReason.GUARD
        revision = revise(stored.state, stored.log, {}, await desk.runs.now())
        await desk.control.retry(stored, revision)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert (result.status, result.output, result.steps_used) == (RunStatus.COMPLETED, "done", 1)
    assert len(requests(hands)) == 1
