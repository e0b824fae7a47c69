"""Results of whole runs: every stop reason, read back by this process and by another."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.runs.opened_runs import finish_with_waits, opened_run
from support.runs.scripted_steps import Script, call, say
from support.runs.tools import broken, look

from stepfleet.orchestrator import (
    AgentRunResult,
    AgentState,
    ContinuationDecision,
    ErrorPolicy,
    FinishReason,
    Lifecycle,
    RunStatus,
    StopReason,
    when,
)
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.records.steps import StepType

Ended = tuple[StopReason, Lifecycle, RunStatus, str]


def second_step_is_too_much(state: AgentState) -> ContinuationDecision:
    too_much = state.step_count >= 2
    return (
        ContinuationDecision.FORBID_CONTINUATION
        if too_much
        else ContinuationDecision.ALLOW_CONTINUATION
    )


LOOK = call(("look", {"what": "a"}), text="still looking")
BREAK = call(("broken", {}))
RUNS: dict[StopReason, tuple[Any, dict[str, Any]]] = {
    StopReason.COMPLETED: (say("done"), {}),
    StopReason.STEPS_LIMIT: (LOOK, {}),
    StopReason.TOKEN_LIMIT: (LOOK, {"token_limit": 30}),
    StopReason.TIME_LIMIT: (LOOK, {"cumulative_timeout": 1e-6}),
    StopReason.RETRY_LIMIT: (BREAK, {"error_policy": ErrorPolicy.retry_tool_errors(2)}),
    StopReason.ERROR: (ModelError("bad request"), {}),
    StopReason.FINISH_REASON: (
        say("cut", finish_reason=FinishReason.LENGTH),
        {"finish_reasons": (FinishReason.LENGTH,)},
    ),
    StopReason.GUARD: (LOOK, {"criteria": (when(second_step_is_too_much),)}),
    StopReason.USER_REQUESTED: (LOOK, {}),
}
ENDS: dict[StopReason, Ended] = {
    reason: (reason, Lifecycle(life), RunStatus(status), criterion)
    for reason, life, status, criterion in (
        (StopReason.COMPLETED, "completed", "completed", "aggregate"),
        (StopReason.STEPS_LIMIT, "stopped", "max_iterations_reached", "StepsLimit"),
        (StopReason.TOKEN_LIMIT, "stopped", "max_iterations_reached", "TokenUsageLimit"),
        (
            StopReason.TIME_LIMIT,
            "stopped",
            "max_iterations_reached",
            "CumulativeExecutionTimeLimit",
        ),
        (StopReason.RETRY_LIMIT, "failed", "error", "ErrorPolicyCriterion"),
        (StopReason.ERROR, "failed", "error", "ErrorPolicyCriterion"),
        (StopReason.FINISH_REASON, "completed", "completed", "FinishReasonCheck"),
        (StopReason.GUARD, "stopped", "error", "CallableCriterion"),
        (StopReason.USER_REQUESTED, "cancelled", "cancelled", "StopRequested"),
    )
}


@pytest.mark.parametrize("reason", list(StopReason))
async def test_every_end_is_reported_by_status_lifecycle_criterion_and_reason(
    redis_url: str, reason: StopReason
) -> None:
    """STATE-10, RUN-03, RUN-04, RUN-15, RUN-16, CONT-27, CONT-28: nine runs, read from Redis.

    RUN-12: as many steps as were committed, the failed ones among them.
    """
    answer, config = RUNS[reason]
    async with opened_run(redis_url, answer, tools=(look, broken), **config) as (
        desk,
        hands,
        run_id,
    ):
        if reason is StopReason.USER_REQUESTED:
            await hands.step(run_id, 0)
            await desk.control.cancel(await desk.stored(run_id), "enough")
        await finish_with_waits(hands, run_id, within=60)
        stored = await desk.stored(run_id)
        result = stored.result()
        assert isinstance(hands.agent.llm, Script)
        calls = len(hands.agent.llm.requests)
    outcome = result.outcome
    assert outcome is not None
    assert (result.stop_reason, result.lifecycle, result.status, outcome.resolved_by) == ENDS[
        reason
    ]
    assert (result.error is not None) is (result.status is RunStatus.ERROR)
    assert result.error is None or result.error.strip()
    committed = stored.state.session_steps
    assert [step.step for step in result.steps] == list(range(1, committed + 1))
    assert stored.step == committed > 0
    if reason in {StopReason.ERROR, StopReason.RETRY_LIMIT}:
        assert result.steps[-1].type is StepType.ERROR
    assert outcome.reason
    assert outcome.evaluations
    if reason is StopReason.GUARD:
        guard = outcome.get_evaluation_for("CallableCriterion")
        assert guard is not None
        assert guard.reason in str(result.error)
    if reason is StopReason.STEPS_LIMIT:
        assert calls == len(result.steps) == 10
        assert result.output == "still looking"


async def test_a_cancel_during_the_second_step_leaves_no_third(redis_url: str) -> None:
    """RUN-17"""

    async def cancel_then_call(_: Any) -> Any:
        await desk.control.cancel(await desk.stored(run_id), "enough")
        return LOOK

    async with opened_run(redis_url, LOOK, cancel_then_call, LOOK, tools=(look,)) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
        assert isinstance(hands.agent.llm, Script)
        assert len(hands.agent.llm.requests) == 2
    assert result.status is RunStatus.CANCELLED
    assert [step.step for step in result.steps] == [1, 2]


async def test_a_run_can_be_replayed_and_explained_from_redis(redis_url: str) -> None:
    """RUN-02, RUN-10, RUN-19, RUN-20, RUN-23, RUN-24, RUN-25, RUN-27."""
    script = (call(("look", {"what": "a"}), ("broken", {}), text="trying"), say("done"))
    policy = ErrorPolicy.ignore_tool_errors()
    async with opened_run(redis_url, *script, tools=(look, broken), error_policy=policy) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.end_time is not None
    elapsed = (result.end_time - result.start_time).total_seconds()
    assert result.duration_seconds == pytest.approx(elapsed)
    assert elapsed >= 0
    assert (result.agent_name, result.output, result.max_iterations) == ("scripted", "done", 10)
    assert result.tool_calls_total == 2
    assert result.tool_calls_by_name == {"look": 1, "broken": 1}
    assert "\n" not in result.summary()
    replay = result.replay().splitlines()
    sections = ["Duration: ", "Iterations: 2 of 10", "Tokens: 30 (20 prompt, 10 completion)"]
    assert [line.startswith(one) for line, one in zip(replay[1:], sections, strict=False)] == [
        True
    ] * 3
    assert {"Steps:", "1. Planning: trying", "2. FinalAnswer: done"} <= set(replay)
    assert replay[-2:] == ["Final output:", "done"]
    assert all(call_id in result.explain() for call_id in ("c0", "c1"))
    trace = result.trace("hello")
    kinds = [type(step).__name__ for step in trace.steps]
    assert kinds[0] == "Task"
    assert kinds[-1] == "FinalAnswer"
    assert (trace.action_count, trace.observation_count, len(trace.errors())) == (2, 2, 1)
    assert trace.is_success


CLIENT = """
import json, sys
from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.records.run.results import AgentRunResult
with Fleet(sys.argv[1]) as fleet:
    result = fleet.runs.result(sys.argv[2])
text = json.dumps(result.to_dict())
assert AgentRunResult.model_validate(json.loads(text)) == result
try:
    result.raise_for_status()
except Exception as error:
    print(json.dumps([type(error).__name__, error.result.steps_used, json.loads(text)]))
"""


@pytest.mark.parametrize(
    ("answer", "raised"), [(LOOK, "MaxStepsExceeded"), (ModelError("bad request"), "RunFailed")]
)
async def test_another_process_reads_the_whole_result_and_may_ask_for_an_exception(
    redis_url: str, answer: Any, raised: str
) -> None:
    """RUN-18, RUN-29, RUN-33: complete JSON that loads back equal, and the stored state with it."""
    async with opened_run(redis_url, answer, tools=(look,), max_steps=2) as (desk, hands, run_id):
        await hands.finish(run_id)
        here = (await desk.stored(run_id)).result()
    client = _client(redis_url, run_id)
    name, steps, told = json.loads(client)
    assert (name, steps) == (raised, here.steps_used)
    assert AgentRunResult.model_validate(told) == here


def _client(redis_url: str, run_id: str) -> str:
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
    done = run(
        [sys.executable, "-c", CLIENT, redis_url, run_id],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


async def test_an_answer_without_usage_succeeds_and_shows_it(redis_url: str) -> None:
    """LLM-12: an estimate, and flags that say so."""
    silent = say("done").model_copy(update={"usage": None})
    async with opened_run(redis_url, silent) as (desk, hands, run_id):
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.success
    assert result.usage.llm_calls == 1
    assert result.usage.prompt_tokens > 0
    assert result.usage_estimated
    assert (result.steps[0].usage_reported, result.steps[0].usage_estimated) == (False, True)


async def test_a_tool_call_is_recorded_with_these_fields_and_no_others(redis_url: str) -> None:
    """RUN-07, RUN-21: no iteration in a call, and no body of a schema in a result."""
    async with opened_run(redis_url, LOOK, say("done"), tools=(look,)) as (desk, hands, run_id):
        await hands.finish(run_id)
        told = (await desk.stored(run_id)).result().to_dict()
    (call_told,) = told["steps"][0]["tool_calls"]
    named = {"tool_name", "call_id", "arguments", "result", "is_error", "duration_ms", "timestamp"}
    assert set(call_told) == named | {"error", "repeated", "custom_state", "media", "version"}
    assert {name for name in told if "schema" in name} <= {"schema_name"}
