"""The last error of a run, and when it is the cause of the run's end."""

import pytest
from support.runs.agent_records import a_result

from stepfleet.orchestrator import AgentRunResult, ErrorInfo, ErrorType, StopReason
from stepfleet.orchestrator.records.run.facts import LastError, cause_of_end, explains, last_error
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.records.steps import StepErrors

STEPS = StopReason.STEPS_LIMIT


def _tool(message: str, tool: str = "stock") -> ErrorInfo:
    return ErrorInfo(type=ErrorType.TOOL, code="X", message=message, tool_name=tool)


def _steps(*errors: str) -> list[StepErrors]:
    """Return a step per text, failed with it unless it is empty."""
    return [
        StepErrors(step=number, errors=(_tool(text),) if text else ())
        for number, text in enumerate(errors, 1)
    ]


def _last(*errors: str) -> LastError:
    found = last_error(_steps(*errors))
    assert found is not None
    return found


def test_the_last_error_says_how_often_its_cause_occurred() -> None:
    found = _last("no 'a'", "no 'b'", "", "no 'c'")
    assert (found.step, found.failed_steps, found.steps, found.good_steps) == (4, 3, 4, 0)
    assert str(found) == "tool 'stock' failed in 3 of 4 steps: no 'c'"
    assert str(_last("", "lost")) == "tool 'stock' failed in step 2: lost"


def test_steps_without_errors_have_no_last_error() -> None:
    assert last_error(_steps("", "")) is None
    assert last_error(()) is None


def test_of_several_errors_of_a_step_the_most_frequent_one_counts() -> None:
    steps = [*_steps("old"), StepErrors(step=2, errors=(_tool("new", "price"), _tool("old")))]
    found = last_error(steps)
    assert found is not None
    assert (found.message, found.failed_steps) == ("old", 2)


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (
            {"error_type": "rate_limit", "code": "RATE_LIMIT_ERROR"},
            "rate_limit error (RATE_LIMIT_ERROR)",
        ),
        ({}, "model error (MODEL_ERROR)"),
    ],
    ids=["with its code", "of an earlier release"],
)
def test_a_model_that_was_out_of_reach_until_the_end_is_the_last_error(
    known: dict[str, str], words: str
) -> None:
    fields = {"kind": "deferred", "step": 2, "reason": "it answered 429", **known}
    lost = [LostAttempt.model_validate(fields), LostAttempt(kind="crash", step=2)]
    found = last_error(_steps(""), lost)
    assert found is not None
    assert str(found) == f"{words} in step 2: it answered 429"
    assert explains(StopReason.TIME_LIMIT, found) is found


@pytest.mark.parametrize(
    ("errors", "explained"),
    [
        (["no"], True),
        (["", "", "no"], True),
        (["no", "no", "", ""], True),
        (["no", "", ""], False),
        (["one", "other", "", ""], False),
    ],
)
def test_an_error_explains_a_limit_if_it_is_new_or_frequent(
    errors: list[str], explained: bool
) -> None:
    found = _last(*errors)
    assert (explains(STEPS, found) is found) is explained
    assert (cause_of_end(STEPS, None, found, "m").kind == "tool") is explained


def test_a_limit_without_an_error_is_its_own_cause() -> None:
    assert str(cause_of_end(STEPS, None, None, "m")) == "steps_limit, without an error"
    guard = cause_of_end(StopReason.GUARD, "cost: 0.2 USD", None, "m")
    assert str(guard) == "guard: cost: # USD"


def test_a_cancel_is_never_explained_by_an_error() -> None:
    cause = cause_of_end(StopReason.USER_REQUESTED, None, _last("no"), "m")
    assert cause.kind == "user_requested"


def test_a_result_has_a_cause_where_it_ended_without_completing() -> None:
    assert a_result().cause is None
    assert a_result(stop_reason=None, status=None).cause is None
    result = a_result(STEPS, last_error=_last("gadget 7 missing"))
    assert result.cause is not None
    assert str(result.cause) == "tool 'stock': gadget # missing"
    again = AgentRunResult.model_validate(result.to_dict())
    assert again.last_error == result.last_error
    assert again.cause == result.cause
