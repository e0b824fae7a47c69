"""The state is a fold over the log; taking a step back is folding one less."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator import (
    AgentState,
    ErrorInfo,
    ErrorType,
    LoggedStep,
    Message,
    StepResult,
    ToolCall,
    ToolCallRecord,
    UsageStats,
)
from stepfleet.orchestrator.protocol.fold import after_step, rebuild
from stepfleet.orchestrator.protocol.revision import revise
from stepfleet.orchestrator.records.state import StateInfo
from stepfleet.orchestrator.records.steps import StepType

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BROKEN = ErrorInfo(type=ErrorType.TOOL, code="TOOL_EXECUTION_ERROR", message="broken")


def initial() -> AgentState:
    return AgentState(agent_id="r", info=StateInfo(id="r", started_at=NOW, updated_at=NOW))


def logged(number: int, seconds: float, tokens: int, *, fails: bool = False) -> LoggedStep:
    call = ToolCall(id=f"c{number}", name="look")
    records = tuple(
        ToolCallRecord(
            tool_name="look",
            call_id=f"c{number}",
            timestamp=NOW,
            result=None if broken else number,
            is_error=broken,
            error=BROKEN if broken else None,
        )
        for broken in ((False, True) if fails else (False,))
    )
    result = StepResult(
        step=number,
        thought=f"thought {number}",
        tool_calls=records,
        usage=UsageStats(total_tokens=tokens, llm_calls=1),
        cost_usd=tokens / 1000,
        type=StepType.ERROR if fails else StepType.TOOL_EXECUTION,
        errors=(BROKEN,) if fails else (),
        started_at=NOW,
        duration_ms=seconds * 1000,
    )
    at = NOW + timedelta(seconds=number)
    return LoggedStep(result=result, messages=(Message.assistant("", (call,)),), committed_at=at)


logs = st.lists(st.tuples(st.floats(0, 100), st.integers(0, 1000), st.booleans()), max_size=12).map(
    lambda rows: [
        logged(number, seconds, tokens, fails=fails)
        for number, (seconds, tokens, fails) in enumerate(rows, 1)
    ]
)


@given(logs)
def test_usage_cost_and_time_are_the_sums_over_the_log(log: list[LoggedStep]) -> None:
    """RUN-09, TIME-12, TIME-15, invariant 6: failed steps count."""
    state = rebuild(initial(), log)
    results = [one.result for one in log]
    assert state.step_count == len(log)
    assert state.usage.total_tokens == sum(one.usage.total_tokens for one in results if one.usage)
    # Not equal: from Python 3.12 on, `sum` of floats is more exact than one addition per step.
    seconds = sum(one.duration_ms / 1000 for one in results)
    assert abs(state.info.cumulative_execution_seconds - seconds) < 1e-9
    assert abs(state.cost_usd - sum(one.cost_usd for one in results)) < 1e-9


@given(logs)
def test_failures_are_the_trailing_run_and_the_total(log: list[LoggedStep]) -> None:
    """ERR-06"""
    failed = [one.result.type is StepType.ERROR for one in log]
    trailing = next((n for n, bad in enumerate(reversed(failed)) if not bad), len(failed))
    failures = rebuild(initial(), log).failures
    assert (failures.consecutive_failures, failures.total_failures) == (trailing, sum(failed))


def test_a_step_does_not_change_the_state_before_it() -> None:
    """STATE-01, STATE-04: updated_at moves with every step."""
    before = initial()
    copy = before.model_copy(deep=True)
    one = logged(1, 75, 10)
    after = after_step(before, one.result, one.messages, NOW + timedelta(minutes=2))
    assert before == copy
    assert after.info.updated_at == NOW + timedelta(minutes=2)
    assert after.info.started_at == NOW
    assert after.info.cumulative_execution_seconds == 75


@given(logs.filter(bool))
def test_a_retry_takes_back_a_failed_last_step_and_nothing_else(log: list[LoggedStep]) -> None:
    fails = log[-1].result.type is StepType.ERROR
    revision = revise(rebuild(initial(), log), log, {}, NOW)
    kept = log[:-1] if fails else log
    assert revision.step == len(kept)
    expected = rebuild(initial(), kept)
    assert revision.state.usage == expected.usage
    assert revision.state.cost_usd == expected.cost_usd
    assert revision.state.failures.consecutive_failures == 0
    assert revision.state.info.execution_started_at == NOW


def test_a_retry_keeps_the_models_answer_and_its_finished_tools() -> None:
    log = [logged(1, 1, 10), logged(2, 1, 20, fails=True)]
    revision = revise(rebuild(initial(), log), log, {}, NOW)
    fields = revision.journal[::2]
    assert fields == ["response", "price", "r:0"]
    assert revision.removed.total_tokens == 20
    assert revision.lost is not None
    assert revision.lost.step == 2
