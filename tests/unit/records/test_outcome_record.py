import pytest

from stepfleet.orchestrator import (
    ContinuationDecision,
    ContinuationEvaluation,
    ContinuationOutcome,
    FinishReason,
    StopReason,
)
from stepfleet.orchestrator.records.steps import StepType

FORBID = ContinuationDecision.FORBID_CONTINUATION


def test_there_are_four_decisions() -> None:
    """CONT-01"""
    assert {one.name: one.value for one in ContinuationDecision} == {
        "FORBID_CONTINUATION": "forbid",
        "ALLOW_CONTINUATION": "allow",
        "REQUEST_CONTINUATION": "request",
        "ALLOW_STOP": "stop",
    }


def test_there_are_nine_stop_reasons() -> None:
    """CONT-07"""
    expected = "completed steps_limit token_limit time_limit retry_limit error finish_reason guard"
    assert {one.value for one in StopReason} == {*expected.split(), "user_requested"}


def test_each_decision_has_its_own_default_reason_with_the_short_name() -> None:
    """CONT-08"""
    made = [
        ContinuationEvaluation.from_decision("package.module.Mine", decision)
        for decision in ContinuationDecision
    ]
    assert {one.criterion for one in made} == {"Mine"}
    assert len({one.reason for one in made}) == 4
    assert all(one.reason.startswith("Mine ") for one in made)
    assert {(one.stop_reason, len(one.context)) for one in made} == {(None, 0)}


def test_the_first_forbidding_criterion_and_any_evaluation_are_found_by_name() -> None:
    """CONT-10, CONT-09"""
    names = ["A", "B", "C"]
    decisions = [ContinuationDecision.ALLOW_CONTINUATION, FORBID, FORBID]
    evaluations = tuple(
        ContinuationEvaluation.from_decision(name, decision)
        for name, decision in zip(names, decisions, strict=True)
    )
    outcome = ContinuationOutcome(
        decision=FORBID, should_continue=False, resolved_by="B", evaluations=evaluations
    )
    assert outcome.get_forbidding_criterion() == "B"
    assert outcome.get_evaluation_for("C") == evaluations[2]
    assert outcome.get_evaluation_for("D") is None
    none = outcome.model_copy(update={"evaluations": evaluations[:1]})
    assert none.get_forbidding_criterion() is None


@pytest.mark.parametrize("name", ["shouldContinue", "should_continue"])
def test_both_spellings_are_read(name: str) -> None:
    """CONT-13"""
    data = {"decision": "stop", name: False, "resolvedBy": "aggregate"}
    assert not ContinuationOutcome.model_validate(data).should_continue


def test_a_step_has_one_of_three_types_or_plans_and_has_a_finish_reason() -> None:
    """STATE-11, RUN-06, PLAN-05: only agents with planning have steps of the fourth type."""
    types = {"tool_execution", "final_response", "error"}
    assert {one.value for one in StepType} == types | {"planning"}
    assert {"stop", "tool_calls", "error"} <= {one.value for one in FinishReason}
