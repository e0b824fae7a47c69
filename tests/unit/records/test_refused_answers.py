"""A refused answer explains its run's end like an error, and is no failure of its step."""

import orjson
from support.runs.agent_records import a_step, an_error

from stepfleet.orchestrator import ErrorPolicy
from stepfleet.orchestrator.continuation.error_policy import next_failures
from stepfleet.orchestrator.records.errors import ANSWER_REFUSED, ErrorContext, refused_answer
from stepfleet.orchestrator.records.run.facts import cause_of_end, explains, last_error
from stepfleet.orchestrator.records.state import LastStep
from stepfleet.orchestrator.records.steps import LoggedErrors, LoggedStep, Progress, StepResult

WHY = refused_answer("verdict: 'maybe' is not one of ['yes', 'no']")


def refused(step: int = 1) -> StepResult:
    return a_step(step).model_copy(update={"refused": WHY})


def test_the_newest_refusal_is_the_last_error_and_the_cause() -> None:
    found = last_error([a_step(1), refused(2)])
    assert found is not None
    assert (found.code, found.message, found.step) == (ANSWER_REFUSED, WHY, 2)
    assert explains("steps_limit", found) is found  # type: ignore[arg-type]
    cause = cause_of_end("steps_limit", None, found, "m")  # type: ignore[arg-type]
    assert str(cause).startswith("validation error (ANSWER_REFUSED): answer refused: verdict:")


def test_it_is_found_in_a_stored_log_as_failures_are_read() -> None:
    logged = LoggedErrors.from_json(LoggedStep(result=refused()).to_json())
    assert [one.message for one in logged.result.problems] == [WHY]


def test_it_counts_for_no_error_policy() -> None:
    after = next_failures(ErrorContext.none(), refused())
    assert after.consecutive_failures == 0
    assert ErrorPolicy().decide(after) == "ignore"
    assert refused().errors == ()


def test_errors_stand_before_it() -> None:
    step = refused().model_copy(update={"errors": (an_error(),)})
    assert [one.code for one in step.problems] == [an_error().code, ANSWER_REFUSED]


def test_records_without_one_are_stored_as_ever() -> None:
    for record in (a_step(1), LastStep.of(a_step(1)), Progress()):
        assert not {"refused", "is_preamble"} & orjson.loads(record.to_json()).keys()


def test_it_is_bounded_and_valid_text() -> None:
    assert len(refused_answer("x" * 10_000)) == 1_000
    assert refused_answer("\ud800").encode()
