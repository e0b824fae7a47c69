import itertools
import random

import pytest
from pydantic import ValidationError
from support.runs.agent_records import (
    a_failed_state,
    a_failed_step,
    a_state,
    a_step,
    an_error,
    failures,
)

from stepfleet.orchestrator import AgentState, ErrorHandlingDecision, ErrorPolicy, ErrorType
from stepfleet.orchestrator.continuation.error_policy import (
    SEVERITY,
    classify,
    next_failures,
    resolve,
)
from stepfleet.orchestrator.records.errors import ErrorContext

STOP, RETRY, IGNORE = ErrorHandlingDecision
T = ErrorType

TABLE = {
    "stop_on_any_error": (ErrorPolicy.stop_on_any_error(), dict.fromkeys(T, STOP), 0),
    "retry_tool_errors": (
        ErrorPolicy.retry_tool_errors(),
        {T.TOOL: RETRY, T.MODEL: STOP, T.VALIDATION: RETRY}
        | {T.RATE_LIMIT: RETRY, T.TIMEOUT: RETRY, T.UNKNOWN: STOP},
        3,
    ),
    "ignore_tool_errors": (
        ErrorPolicy.ignore_tool_errors(),
        {T.TOOL: IGNORE, T.MODEL: STOP, T.VALIDATION: IGNORE}
        | {T.RATE_LIMIT: RETRY, T.TIMEOUT: RETRY, T.UNKNOWN: IGNORE},
        0,
    ),
    "retry_all": (ErrorPolicy.retry_all(), dict.fromkeys(T, RETRY), 5),
}


def test_there_are_six_error_types() -> None:
    """ERR-01"""
    names = {"tool", "model", "validation", "rate_limit", "timeout", "unknown"}
    assert {one.value for one in ErrorType} == names


def test_there_are_three_ways_to_handle_an_error() -> None:
    """ERR-02"""
    assert {one.value for one in ErrorHandlingDecision} == {"stop", "retry", "ignore"}


def test_the_context_without_failures_is_zeroed() -> None:
    """ERR-03"""
    none = ErrorContext.none()
    assert (none.type, none.consecutive_failures, none.total_failures) == (T.UNKNOWN, 0, 0)
    assert (none.message, none.tool_name, none.metadata) == (None, None, {})


@pytest.mark.parametrize("preset", TABLE)
@pytest.mark.parametrize("error_type", list(ErrorType))
def test_a_preset_handles_each_type_as_its_table_says(preset: str, error_type: ErrorType) -> None:
    """ERR-08, ERR-09, ERR-10, ERR-11"""
    policy, table, max_retries = TABLE[preset]
    assert policy.handling(error_type) is table[error_type]
    assert policy.max_retries == max_retries


def test_presets_take_the_number_of_failures_at_which_retrying_stops() -> None:
    """ERR-09, ERR-11"""
    assert ErrorPolicy.retry_tool_errors(7).max_retries == 7
    assert ErrorPolicy.retry_all(2).max_retries == 2


@pytest.mark.parametrize("preset", TABLE)
def test_no_failures_are_ignored(preset: str) -> None:
    """ERR-12"""
    policy = TABLE[preset][0]
    assert policy.decide(ErrorContext.none()) is IGNORE
    assert policy.decide(ErrorContext(total_failures=4)) is IGNORE
    assert not policy.is_exhausted(ErrorContext.none())


def test_retry_becomes_stop_at_the_third_failure_in_a_row() -> None:
    """ERR-13"""
    policy = ErrorPolicy.retry_tool_errors(3)
    assert [policy.decide(failures(T.TOOL, n)) for n in (1, 2, 3, 4)] == [RETRY, RETRY, STOP, STOP]


def test_retry_without_retries_always_stops_and_is_exhausted() -> None:
    """ERR-13: rate_limit and timeout under ignore_tool_errors, whose max_retries is 0."""
    policy = ErrorPolicy.ignore_tool_errors()
    for error_type in (T.RATE_LIMIT, T.TIMEOUT):
        assert policy.decide(failures(error_type)) is STOP
        assert policy.is_exhausted(failures(error_type))


def test_only_a_retried_type_can_be_exhausted() -> None:
    """ERR-19"""
    policy = ErrorPolicy.retry_tool_errors(2)
    assert policy.is_exhausted(failures(T.TOOL, 2))
    assert not policy.is_exhausted(failures(T.TOOL, 1))
    assert not policy.is_exhausted(failures(T.MODEL, 9))
    assert not ErrorPolicy.ignore_tool_errors().is_exhausted(failures(T.TOOL, 9))


def test_modifiers_return_changed_copies() -> None:
    """ERR-14"""
    policy = ErrorPolicy.stop_on_any_error()
    changed = policy.with_max_retries(4).with_tool_error_handling(RETRY)
    assert (changed.max_retries, changed.tool) == (4, RETRY)
    assert policy == ErrorPolicy()


@pytest.mark.parametrize("error_type", list(ErrorType))
@pytest.mark.parametrize("decision", list(ErrorHandlingDecision))
def test_every_type_alone_can_be_handled_anew(
    error_type: ErrorType, decision: ErrorHandlingDecision
) -> None:
    """ERR-14, ERR-27"""
    for before, _, _ in TABLE.values():
        after = before.with_handling(error_type, decision)
        assert after.handling(error_type) is decision
        others = [one for one in ErrorType if one is not error_type]
        assert [after.handling(one) for one in others] == [before.handling(one) for one in others]


def test_a_policy_is_immutable_and_survives_storage() -> None:
    """ERR-07"""
    policy = ErrorPolicy.retry_all(2)
    with pytest.raises(ValidationError, match="frozen"):
        policy.max_retries = 9  # type: ignore[misc]
    assert ErrorPolicy.from_json(policy.to_json()) == policy


def test_a_negative_number_of_retries_is_refused() -> None:
    """ERR-07"""
    with pytest.raises(ValidationError, match="max_retries"):
        ErrorPolicy().with_max_retries(-1)


def test_a_step_without_errors_has_no_type() -> None:
    """ERR-05"""
    assert classify(()) is None


def test_the_severest_type_names_a_steps_error_in_any_order_of_completion() -> None:
    """ERR-30, ERR-05"""
    for types in itertools.permutations(ErrorType):
        worst = classify([an_error(one) for one in types])
        assert worst is not None
        assert worst.type is SEVERITY[0]
    assert set(SEVERITY) == set(ErrorType)


def test_the_first_in_call_order_names_errors_of_one_type() -> None:
    """ERR-30"""
    pair = [an_error(T.TOOL, tool_name="first"), an_error(T.TOOL, tool_name="second")]
    worst = classify([an_error(T.UNKNOWN), *pair])
    assert worst is not None
    assert worst.tool_name == "first"


@pytest.mark.parametrize("error_type", list(ErrorType))
def test_each_type_of_failure_reaches_the_policy_as_itself(error_type: ErrorType) -> None:
    """ERR-05: all six, validation among them."""
    after = next_failures(ErrorContext.none(), a_failed_step(1, error_type))
    assert after.type is error_type
    assert after.message == f"{error_type.value} error"


def test_failures_in_a_row_and_in_all_are_counted_apart() -> None:
    """ERR-06: fail, ok, fail, fail."""
    context = ErrorContext.none()
    for step in (a_failed_step(1), a_step(2), a_failed_step(3), a_failed_step(4)):
        context = ErrorContext.from_json(next_failures(context, step).to_json())
    assert (context.consecutive_failures, context.total_failures) == (2, 3)


def test_counts_equal_a_recount_of_any_history() -> None:
    """ERR-06"""
    rng = random.Random(5)
    for _ in range(200):
        failed = [rng.random() < 0.5 for _ in range(rng.randrange(12))]
        context = ErrorContext.none()
        for number, bad in enumerate(failed, start=1):
            context = next_failures(context, a_failed_step(number) if bad else a_step(number))
        trailing = len(list(itertools.takewhile(bool, reversed(failed))))
        assert (context.consecutive_failures, context.total_failures) == (trailing, sum(failed))


def test_a_success_forgets_the_type_and_the_tool_of_the_failure_before_it() -> None:
    """ERR-06"""
    failed = next_failures(ErrorContext.none(), a_failed_step(1, T.TOOL))
    assert next_failures(failed, a_step(2)) == ErrorContext(total_failures=1)


def test_the_default_resolver_reads_what_the_state_has_counted() -> None:
    """ERR-04"""
    state = a_failed_state(T.TIMEOUT, 2)
    assert resolve(state) == failures(T.TIMEOUT, 2)
    assert resolve(AgentState.from_json(state.to_json())) == resolve(state)
    assert resolve(a_state(1)) == ErrorContext.none()
