import math
from datetime import timedelta

import pytest
from support.runs.agent_records import START, a_last_step, a_state, an_info

from stepfleet.orchestrator import (
    AgentState,
    ContinuationCriteria,
    ContinuationDecision,
    ErrorPolicy,
    ErrorType,
    FinishReason,
    StopReason,
    UsageStats,
)
from stepfleet.orchestrator.continuation import (
    BudgetLimit,
    CanDecideToContinue,
    CanExplainContinuation,
    CumulativeExecutionTimeLimit,
    ErrorPolicyCriterion,
    ExecutionTimeLimit,
    FinishReasonCheck,
    StepsLimit,
    StopRequested,
    TokenUsageLimit,
)
from stepfleet.orchestrator.continuation.error_policy import ErrorHandlingDecision
from stepfleet.orchestrator.continuation.guards import Maximum
from stepfleet.orchestrator.records.errors import ErrorContext

FORBID = ContinuationDecision.FORBID_CONTINUATION
ALLOW = ContinuationDecision.ALLOW_CONTINUATION


def tokens(total: int) -> AgentState:
    return a_state(1, usage=UsageStats(total_tokens=total))


def spent(seconds: float) -> AgentState:
    return a_state(1, info=an_info().add_execution_time(seconds))


def elapsed(seconds: float) -> AgentState:
    info = an_info(execution_started_at=START).at(START + timedelta(seconds=seconds))
    return a_state(1, info=info)


BOUNDARIES = [
    (StepsLimit(3), a_state(2), a_state(3), StopReason.STEPS_LIMIT, ("3", "3")),
    (
        TokenUsageLimit(2000000),
        tokens(1999999),
        tokens(2000000),
        StopReason.TOKEN_LIMIT,
        ("2000000", "2000000"),
    ),
    (
        CumulativeExecutionTimeLimit(2.5),
        spent(2.49),
        spent(2.5),
        StopReason.TIME_LIMIT,
        ("2.5 s", "2.5 s"),
    ),
    (ExecutionTimeLimit(2), elapsed(1.99), elapsed(2.0), StopReason.TIME_LIMIT, ("2 s", "2 s")),
    (
        BudgetLimit(0.05),
        a_state(1, cost_usd=0.0499),
        a_state(1, cost_usd=0.05),
        StopReason.GUARD,
        ("0.05 USD", "0.05 USD"),
    ),
]


@pytest.mark.parametrize(
    ("limit", "below", "at", "reason", "numbers"),
    BOUNDARIES,
    ids=lambda value: type(value).__name__ if isinstance(value, Maximum) else "",
)
def test_a_limit_allows_below_and_forbids_from_its_number_on(
    limit: Maximum,
    below: AgentState,
    at: AgentState,
    reason: StopReason,
    numbers: tuple[str, str],
) -> None:
    """CONT-15, CONT-16, CONT-17, CONT-18, CONT-28"""
    assert (limit.decide(below), limit.decide(at)) == (ALLOW, FORBID)
    allowed, forbidden = limit.explain(below), limit.explain(at)
    assert (allowed.decision, allowed.stop_reason) == (ALLOW, None)
    assert (forbidden.decision, forbidden.stop_reason) == (FORBID, reason)
    value, maximum = numbers
    assert f"{value} has reached the limit of {maximum}" in forbidden.reason
    assert forbidden.context == {"value": limit.measure(at), "limit": limit.maximum}


def test_what_one_run_adds_to_its_explanation_is_not_in_anothers() -> None:
    state = a_state(2)
    StepsLimit(3).explain(state).context["customer"] = "one"
    assert StepsLimit(3).explain(state).context == {"value": 2, "limit": 3}


def test_a_limit_is_explained_in_its_own_words() -> None:
    limit = StepsLimit(2)
    limit.what, limit.unit, limit.stop_reason = "rounds", " of talk", StopReason.GUARD
    told = limit.explain(a_state(2))
    assert told.reason == "rounds: 2 of talk has reached the limit of 2 of talk"
    assert told.stop_reason is StopReason.GUARD


class EveryOther(StepsLimit):
    """Measures steps, and decides by another rule."""

    def decide(self, state: AgentState) -> ContinuationDecision:
        return FORBID if state.step_count % 2 else ALLOW


def test_a_limit_of_the_users_is_explained_with_its_own_decision() -> None:
    assert EveryOther(9).explain(a_state(1)).decision is FORBID
    assert EveryOther(9).explain(a_state(2)).decision is ALLOW
    lenient = StepsLimit(1)
    lenient.decide = lambda _: ALLOW  # type: ignore[assignment, method-assign]
    assert lenient.explain(a_state(5)).decision is ALLOW


class ThreeStrikes(ErrorPolicy):
    """Stops whatever the last step was."""

    def decide(self, context: ErrorContext) -> ErrorHandlingDecision:
        return ErrorHandlingDecision.STOP


def test_a_policy_that_stops_after_a_good_step_says_so() -> None:
    criterion = ErrorPolicyCriterion(ThreeStrikes())
    state = a_state(2)
    assert criterion.decide(state) is criterion.explain(state).decision is FORBID


@pytest.mark.parametrize(
    "kind",
    [
        StepsLimit,
        TokenUsageLimit,
        ExecutionTimeLimit,
        CumulativeExecutionTimeLimit,
        BudgetLimit,
    ],
)
@pytest.mark.parametrize("number", [0, -1, -0.5, math.nan, math.inf])
def test_a_limit_that_limits_nothing_is_refused(kind: type[Maximum], number: float) -> None:
    """TIME-19"""
    with pytest.raises(ValueError, match="must be a finite number above 0"):
        kind(number)


def test_the_clock_of_a_time_limit_can_be_frozen() -> None:
    """CONT-17, TIME-20"""
    moment = START + timedelta(seconds=59)
    limit = ExecutionTimeLimit(60, clock=lambda: moment)
    assert limit.decide(elapsed(3600)) is ALLOW
    moment += timedelta(seconds=1)
    assert limit.decide(elapsed(0)) is FORBID


@pytest.mark.parametrize("age", [timedelta(days=1), timedelta(days=7)])
def test_an_old_session_does_not_time_out_a_new_execution(age: timedelta) -> None:
    """TIME-03"""
    now = START + age
    info = an_info(execution_started_at=now).at(now + timedelta(seconds=5))
    assert ExecutionTimeLimit(300).decide(a_state(1, info=info)) is ALLOW


def test_a_missing_execution_start_falls_back_to_the_sessions() -> None:
    """TIME-07"""
    state = a_state(1, info=an_info().at(START + timedelta(seconds=300)))
    assert state.info.execution_started_at is None
    assert ExecutionTimeLimit(300).decide(state) is FORBID


def test_waiting_counts_for_the_wall_clock_and_not_for_the_time_in_steps() -> None:
    """TIME-13, TIME-14: an hour's pause between steps that took 4 s."""
    info = an_info(execution_started_at=START).add_execution_time(4).at(START + timedelta(hours=1))
    state = a_state(2, info=info)
    assert CumulativeExecutionTimeLimit(10).decide(state) is ALLOW
    assert ExecutionTimeLimit(10).decide(state) is FORBID


def test_no_finish_reason_ends_a_run_by_default() -> None:
    """CONT-19"""
    for reason in FinishReason:
        state = a_state(1, current_step=a_last_step(finish_reason=reason))
        assert FinishReasonCheck().decide(state) is ALLOW


def test_a_configured_finish_reason_forbids() -> None:
    """CONT-19, CONT-28"""
    check = FinishReasonCheck([FinishReason.LENGTH, FinishReason.CONTENT_FILTER])
    cut = check.explain(a_state(1, current_step=a_last_step(finish_reason=FinishReason.LENGTH)))
    assert (cut.decision, cut.stop_reason) == (FORBID, StopReason.FINISH_REASON)
    assert cut.context == {"finish_reason": "length", "ends_on": ["content_filter", "length"]}
    assert check.explain(a_state(1)).stop_reason is None
    assert check.decide(a_state(0)) is ALLOW


def test_a_finish_reason_that_does_not_exist_is_refused() -> None:
    """CONT-19"""
    with pytest.raises(ValueError, match="lenght"):
        FinishReasonCheck(["lenght"])  # type: ignore[list-item]


@pytest.mark.parametrize("note", ["", "wrong data"])
def test_a_recorded_cancel_forbids_as_requested_by_the_user(note: str) -> None:
    """CONT-22"""
    outcome = ContinuationCriteria(StopRequested()).evaluate(a_state(1, stop_requested=note))
    assert (outcome.resolved_by, outcome.stop_reason) == (
        "StopRequested",
        StopReason.USER_REQUESTED,
    )
    assert outcome.reason.startswith("cancelled on request")
    assert note in outcome.reason
    assert StopRequested().decide(a_state(1)) is ALLOW
    assert StopRequested().explain(a_state(1)).stop_reason is None


def test_a_custom_resolver_replaces_the_states_own_count() -> None:
    """ERR-04"""
    failing = ErrorContext(type=ErrorType.VALIDATION, consecutive_failures=1, tool_name="mine")
    criterion = ErrorPolicyCriterion(ErrorPolicy(), lambda _: failing)
    assert criterion.decide(a_state(1)) is FORBID
    assert criterion.explain(a_state(1)).context["toolName"] == "mine"


@pytest.mark.parametrize(
    "criterion",
    [
        *(boundary[0] for boundary in BOUNDARIES),
        FinishReasonCheck(),
        StopRequested(),
        ErrorPolicyCriterion(ErrorPolicy()),
    ],
    ids=lambda one: type(one).__name__,
)
def test_every_guard_decides_and_explains_alike(criterion: object) -> None:
    """CONT-14, ERR-15"""
    assert isinstance(criterion, CanDecideToContinue)
    assert isinstance(criterion, CanExplainContinuation)
    for _, below, at, _, _ in BOUNDARIES:
        for state in (below, at, a_state()):
            explained = criterion.explain(state)
            assert explained.decision is criterion.decide(state)
            assert explained.criterion == type(criterion).__name__
