import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs.agent_records import (
    START,
    a_busy_state,
    a_failed_state,
    a_last_step,
    a_state,
    an_info,
)

from stepfleet.orchestrator import (
    AgentState,
    ContinuationCriteria,
    ContinuationDecision,
    ErrorHandlingDecision,
    ErrorPolicy,
    ErrorType,
    FinishReason,
    RunStatus,
    StopReason,
    UsageStats,
    continuation,
    when,
)
from stepfleet.orchestrator.continuation import (
    FinishReasonCheck,
    ToolCallPresenceCheck,
    base_criteria,
)
from stepfleet.orchestrator.records.run.results import run_status

ALLOW = ContinuationDecision.ALLOW_CONTINUATION
PRESETS = {
    "stop_on_any_error": ErrorPolicy.stop_on_any_error(),
    "retry_tool_errors": ErrorPolicy.retry_tool_errors(),
    "ignore_tool_errors": ErrorPolicy.ignore_tool_errors(),
    "retry_all": ErrorPolicy.retry_all(),
    "ignore everything": ErrorPolicy.model_validate(
        {one.value: ErrorHandlingDecision.IGNORE for one in ErrorType}
    ),
}
ORDER = [
    "StopRequested",
    "StepsLimit",
    "TokenUsageLimit",
    "ExecutionTimeLimit",
    "ErrorPolicyCriterion",
    "FinishReasonCheck",
    "ToolCallPresenceCheck",
    "PendingRetry",
]


def names(criteria: ContinuationCriteria) -> list[str]:
    return [one.criterion for one in criteria.evaluate(a_state(1)).evaluations]


def test_the_base_set_has_its_order_and_the_users_criteria_stand_behind_it() -> None:
    """CONT-23"""
    assert names(base_criteria()) == ORDER
    mine = base_criteria(budget_usd=1, extra=[when(lambda _: ALLOW)])
    assert names(mine) == [*ORDER, "BudgetLimit", "CallableCriterion"]


def test_legacy_criteria_are_not_in_the_base_set_nor_anywhere() -> None:
    """CONT-31"""
    assert not {"ErrorPresenceCheck", "RetryLimit"} & {*names(base_criteria()), *dir(continuation)}


def test_a_cumulative_timeout_replaces_the_wall_clock_limit() -> None:
    """TIME-18"""
    replaced = names(base_criteria(cumulative_timeout=60))
    assert "ExecutionTimeLimit" not in replaced
    assert replaced.index("CumulativeExecutionTimeLimit") == ORDER.index("ExecutionTimeLimit")


def test_none_switches_a_limit_off() -> None:
    """CONT-23"""
    off = base_criteria(token_limit=None, time_limit=None)
    assert names(off) == [one for one in ORDER if one not in {ORDER[2], ORDER[3]}]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (a_busy_state(10), StopReason.STEPS_LIMIT),
        (a_busy_state(1, usage=UsageStats(total_tokens=32_768)), StopReason.TOKEN_LIMIT),
        (a_busy_state(1, info=an_info().at(START.replace(minute=5))), StopReason.TIME_LIMIT),
        (a_failed_state(ErrorType.TOOL, tools=True), StopReason.ERROR),
    ],
)
def test_the_defaults_are_10_steps_32768_tokens_300_seconds_and_stop_on_any_error(
    state: AgentState, reason: StopReason
) -> None:
    """CONT-27, CONT-23, ERR-17"""
    assert base_criteria().evaluate(state).stop_reason is reason
    lenient = base_criteria(
        max_steps=11,
        token_limit=32_769,
        time_limit=301,
        error_policy=ErrorPolicy.retry_tool_errors(),
    )
    outcome = lenient.evaluate(state)
    assert outcome.get_forbidding_criterion() is None


def test_an_exceeded_limit_forbids_before_the_first_step() -> None:
    """CONT-24"""
    late = a_state(0, info=an_info().at(START.replace(hour=13)))
    assert base_criteria().evaluate(late).stop_reason is StopReason.TIME_LIMIT
    assert base_criteria().can_continue(a_state(0))


def test_the_time_of_the_step_just_done_counts() -> None:
    """TIME-16: one step longer than the limit."""
    state = a_busy_state(1, info=an_info().add_execution_time(2.0))
    outcome = base_criteria(cumulative_timeout=1.5).evaluate(state)
    assert outcome.stop_reason is StopReason.TIME_LIMIT


NINE = {
    StopReason.COMPLETED: a_state(1),
    StopReason.STEPS_LIMIT: a_busy_state(10),
    StopReason.TOKEN_LIMIT: a_busy_state(1, usage=UsageStats(total_tokens=99_999)),
    StopReason.TIME_LIMIT: a_busy_state(1, info=an_info().at(START.replace(hour=13))),
    StopReason.RETRY_LIMIT: a_failed_state(ErrorType.TOOL, 2),
    StopReason.ERROR: a_failed_state(ErrorType.MODEL, 1),
    StopReason.FINISH_REASON: a_state(
        1, current_step=a_last_step(finish_reason=FinishReason.LENGTH)
    ),
    StopReason.GUARD: a_busy_state(1, cost_usd=2.0),
    StopReason.USER_REQUESTED: a_state(1, stop_requested="enough"),
}


@pytest.mark.parametrize("reason", list(StopReason))
def test_every_stop_reason_is_reached_and_explained(reason: StopReason) -> None:
    """CONT-28, CONT-07, ERR-19"""
    criteria = base_criteria(
        error_policy=ErrorPolicy.retry_tool_errors(2),
        finish_reasons=[FinishReason.LENGTH],
        budget_usd=1.0,
    )
    outcome = criteria.evaluate(NINE[reason])
    assert not outcome.should_continue
    assert outcome.stop_reason is reason
    assert outcome.reason
    if reason is not StopReason.COMPLETED:
        deciding = outcome.get_evaluation_for(outcome.resolved_by)
        assert deciding is not None
        assert deciding.context


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("error_type", list(ErrorType))
@pytest.mark.parametrize("tools", [False, True], ids=["model call", "tools"])
def test_a_run_whose_last_step_failed_never_completes(
    preset: str, error_type: ErrorType, tools: bool
) -> None:
    """ERR-31, CONT-29: every preset and every type of error, until the run ends."""
    policy = PRESETS[preset]
    criteria = base_criteria(max_steps=8, error_policy=policy)
    outcomes = (
        (n, criteria.evaluate(a_failed_state(error_type, n, tools=tools)))
        for n in itertools.count(1)
    )
    consecutive, outcome = next(one for one in outcomes if not one[1].should_continue)
    retried = policy.handling(error_type) is ErrorHandlingDecision.RETRY
    ignored = policy.handling(error_type) is ErrorHandlingDecision.IGNORE
    assert run_status(outcome.stop_reason) is not RunStatus.COMPLETED
    if ignored:
        assert (outcome.stop_reason, consecutive) == (StopReason.STEPS_LIMIT, 8)
    elif retried:
        assert outcome.stop_reason is StopReason.RETRY_LIMIT
        assert consecutive == max(1, policy.max_retries)
    else:
        assert (outcome.stop_reason, consecutive) == (StopReason.ERROR, 1)


@pytest.mark.parametrize(
    "criteria",
    [
        ContinuationCriteria(),
        ContinuationCriteria(ToolCallPresenceCheck()),
        ContinuationCriteria(FinishReasonCheck([FinishReason.ERROR])),
        base_criteria(error_policy=ErrorPolicy.retry_all(), finish_reasons=[FinishReason.ERROR]),
    ],
    ids=["none", "no driver for retries", "finish reason", "base set with finish reason"],
)
def test_no_set_of_criteria_turns_a_failed_step_into_a_completed_run(
    criteria: ContinuationCriteria,
) -> None:
    """ERR-31"""
    outcome = criteria.evaluate(a_failed_state(ErrorType.MODEL))
    assert (outcome.should_continue, outcome.stop_reason) == (False, StopReason.ERROR)
    assert outcome.reason


@given(
    steps=st.integers(0, 12),
    tokens=st.integers(0, 40_000),
    seconds=st.floats(0, 400),
    cost=st.floats(0, 2),
    tools=st.booleans(),
    error=st.sampled_from([None, *ErrorType]),
    preset=st.sampled_from(sorted(PRESETS)),
)
def test_the_stored_state_holds_all_that_criteria_need(
    steps: int,
    tokens: int,
    seconds: float,
    cost: float,
    tools: bool,
    error: ErrorType | None,
    preset: str,
) -> None:
    """CONT-30: the hand-off form evaluates to the same outcome as the state in memory."""
    fields = {
        "usage": UsageStats(total_tokens=tokens),
        "cost_usd": cost,
        "info": an_info().add_execution_time(seconds),
    }
    if error and steps:
        state = a_failed_state(error, steps, tools=tools).model_copy(update=fields)
    else:
        state = a_state(steps, **fields, current_step=a_last_step(has_tool_calls=tools))
    criteria = base_criteria(
        error_policy=PRESETS[preset], cumulative_timeout=300, budget_usd=1.0, token_limit=32_768
    )
    handed_over = AgentState.from_json(state.to_json())
    assert criteria.evaluate(handed_over) == criteria.evaluate(state)


def test_evaluating_the_base_set_costs_little() -> None:
    """OBS-08: the best of many tries, so that a busy machine does not fail it."""
    criteria = base_criteria(budget_usd=1.0)
    state = a_state(1)
    best = float("inf")
    for _ in range(300):
        started = time.perf_counter()
        criteria.evaluate(state)
        best = min(best, time.perf_counter() - started)
    assert best < 200e-6
