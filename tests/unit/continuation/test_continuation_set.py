import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs.agent_records import a_last_step, a_state

from stepfleet.orchestrator import (
    AgentState,
    ContinuationCriteria,
    ContinuationDecision,
    ContinuationEvaluation,
    ContinuationOutcome,
    StopReason,
    when,
)
from stepfleet.orchestrator.continuation import (
    CanDecideToContinue,
    CanExplainContinuation,
    StepsLimit,
    ToolCallPresenceCheck,
)

FORBID = ContinuationDecision.FORBID_CONTINUATION
ALLOW = ContinuationDecision.ALLOW_CONTINUATION
REQUEST = ContinuationDecision.REQUEST_CONTINUATION
STOP = ContinuationDecision.ALLOW_STOP
STATE = a_state(1)
DECISIONS = st.sampled_from(ContinuationDecision)


class Says:
    """A criterion that can decide and cannot explain."""

    def __init__(self, decision: ContinuationDecision) -> None:
        self.decision = decision

    def decide(self, _: AgentState) -> ContinuationDecision:
        return self.decision


class SaysAgain(Says):
    """The same under another name."""


class Explains:
    """A criterion that returns the evaluation it was given."""

    def __init__(self, evaluation: object) -> None:
        self.evaluation = evaluation

    def decide(self, _: AgentState) -> ContinuationDecision:
        return ALLOW

    def explain(self, _: AgentState) -> ContinuationEvaluation:
        return self.evaluation  # type: ignore[return-value]


class Raises:
    """A criterion with a fault."""

    def decide(self, _: AgentState) -> ContinuationDecision:
        raise ZeroDivisionError("no denominator")


def forbidding(reason: StopReason | None) -> Explains:
    return Explains(
        ContinuationEvaluation(
            criterion="Mine", decision=FORBID, reason="because", stop_reason=reason
        )
    )


def expected(decisions: set[ContinuationDecision]) -> bool:
    """Return what the table of B1 says, written down a second time."""
    if FORBID in decisions:
        return False
    if REQUEST in decisions:
        return True
    return STOP not in decisions and ALLOW in decisions


@pytest.mark.parametrize("size", range(5))
def test_every_set_of_decisions_resolves_as_the_table_says(size: int) -> None:
    """CONT-02, CONT-03: all 16 subsets in every order."""
    for subset in itertools.combinations(ContinuationDecision, size):
        for order in itertools.permutations(subset):
            outcome = ContinuationCriteria(*map(Says, order)).evaluate(STATE)
            assert outcome.should_continue is expected(set(subset))
            asked = FORBID if FORBID in subset else STOP
            assert outcome.decision is (REQUEST if outcome.should_continue else asked)


@given(st.lists(DECISIONS, max_size=12), st.randoms())
def test_the_order_of_criteria_does_not_change_the_result(
    decisions: list[ContinuationDecision], rng: random.Random
) -> None:
    """CONT-03"""
    shuffled = decisions.copy()
    rng.shuffle(shuffled)
    one, other = (
        ContinuationCriteria(*map(Says, order)).evaluate(STATE) for order in (decisions, shuffled)
    )
    assert (one.should_continue, one.decision) == (other.should_continue, other.decision)
    assert one.stop_reason is other.stop_reason


@given(st.lists(DECISIONS, max_size=8))
def test_the_short_questions_agree_with_the_long_one(
    decisions: list[ContinuationDecision],
) -> None:
    """CONT-05"""
    criteria = ContinuationCriteria(*map(Says, decisions))
    outcome = criteria.evaluate(STATE)
    assert criteria.can_continue(STATE) is outcome.should_continue
    assert criteria.decide(STATE) is outcome.decision


def test_every_criterion_is_evaluated_behind_one_that_forbids() -> None:
    """CONT-04, CONT-09"""
    criteria = ContinuationCriteria(Says(FORBID), *map(Says, ContinuationDecision))
    outcome = criteria.evaluate(STATE)
    assert len(outcome.evaluations) == 5
    assert not outcome.should_continue


def test_no_criteria_mean_stop() -> None:
    """CONT-06"""
    outcome = ContinuationCriteria().evaluate(STATE)
    assert outcome == ContinuationOutcome(
        decision=STOP, should_continue=False, resolved_by="aggregate"
    )
    assert outcome.stop_reason is StopReason.COMPLETED


@pytest.mark.parametrize(
    ("criteria", "resolved_by"),
    [
        ((Says(REQUEST), SaysAgain(FORBID), Says(FORBID)), "SaysAgain"),
        ((Says(ALLOW), SaysAgain(REQUEST), Says(REQUEST)), "SaysAgain"),
        ((Says(ALLOW), SaysAgain(STOP)), "aggregate"),
        ((Says(ALLOW),), "aggregate"),
    ],
)
def test_the_first_criterion_that_forbids_or_requests_resolves(
    criteria: tuple[Says, ...], resolved_by: str
) -> None:
    """CONT-11"""
    assert ContinuationCriteria(*criteria).evaluate(STATE).resolved_by == resolved_by


@pytest.mark.parametrize(
    ("criterion", "reason"),
    [
        (forbidding(StopReason.TIME_LIMIT), StopReason.TIME_LIMIT),
        (forbidding(None), StopReason.GUARD),
        (Says(FORBID), StopReason.GUARD),
        (Says(STOP), StopReason.COMPLETED),
    ],
)
def test_the_stop_reason_is_the_forbidding_criterions_own_or_guard(
    criterion: CanDecideToContinue, reason: StopReason
) -> None:
    """CONT-12"""
    assert ContinuationCriteria(criterion).evaluate(STATE).stop_reason is reason


def test_criteria_that_only_decide_get_a_default_reason() -> None:
    """CONT-14, CONT-08"""
    assert isinstance(Says(ALLOW), CanDecideToContinue)
    assert not isinstance(Says(ALLOW), CanExplainContinuation)
    outcome = ContinuationCriteria(*map(Says, ContinuationDecision)).evaluate(STATE)
    assert len({one.reason for one in outcome.evaluations}) == 4
    assert all(one.reason.startswith("Says ") for one in outcome.evaluations)


def test_the_reason_of_a_criterion_that_explains_is_kept() -> None:
    """CONT-14, CONT-28"""
    outcome = ContinuationCriteria(forbidding(None)).evaluate(STATE)
    assert outcome.evaluations[0].reason == "because"


def test_sets_nest() -> None:
    """CONT-21"""
    inner = ContinuationCriteria(Says(ALLOW), ContinuationCriteria(SaysAgain(FORBID)))
    outcome = ContinuationCriteria(Says(REQUEST), inner).evaluate(STATE)
    assert [one.decision for one in outcome.evaluations] == [REQUEST, ALLOW, FORBID]
    assert outcome.resolved_by == "SaysAgain"


def test_a_criterion_that_raises_stops_the_run_with_an_explained_error() -> None:
    """CONT-26"""
    outcome = ContinuationCriteria(Says(REQUEST), Raises(), Says(ALLOW)).evaluate(STATE)
    assert (outcome.should_continue, outcome.stop_reason) == (False, StopReason.ERROR)
    assert outcome.resolved_by == "Raises"
    assert outcome.reason == "criterion Raises failed: ZeroDivisionError: no denominator"
    assert len(outcome.evaluations) == 3


@pytest.mark.parametrize(
    "broken",
    [
        Explains(None),
        Explains(
            ContinuationEvaluation(
                criterion="Mine", decision=ALLOW, reason="x", context={"what": object()}
            )
        ),
        when(lambda _: "perhaps"),  # type: ignore[arg-type, return-value]
        Says("perhaps"),  # type: ignore[arg-type]
    ],
    ids=["no evaluation", "not storable", "unknown word of a function", "unknown word"],
)
def test_an_answer_that_is_none_or_cannot_be_stored_counts_as_a_failure(
    broken: CanDecideToContinue,
) -> None:
    """CONT-26: the outcome can always be committed."""
    outcome = ContinuationCriteria(broken).evaluate(STATE)
    assert outcome.stop_reason is StopReason.ERROR
    assert ContinuationOutcome.from_json(outcome.to_json()) == outcome


def test_a_function_in_place_of_a_criterion_is_refused_with_the_fix() -> None:
    """CONT-26"""
    function: Callable[[AgentState], ContinuationDecision] = lambda _: ALLOW  # noqa: E731
    outcome = ContinuationCriteria(function).evaluate(STATE)  # type: ignore[arg-type]
    assert outcome.stop_reason is StopReason.ERROR
    assert "when(...)" in outcome.reason


def test_the_reason_is_that_of_the_instance_which_decided() -> None:
    """CONT-28: two limits of one class, the second one forbids."""
    outcome = ContinuationCriteria(StepsLimit(9), StepsLimit(1)).evaluate(STATE)
    assert outcome.reason == "steps: 1 has reached the limit of 1"


def test_an_outcome_without_a_deciding_criterion_still_has_a_reason() -> None:
    """CONT-28"""
    assert ContinuationCriteria(Says(STOP)).evaluate(STATE).reason
    assert "forbade" in ContinuationCriteria(Says(ALLOW)).evaluate(STATE).reason


def test_an_outcome_is_stored_in_camel_case_and_loads_back_equal() -> None:
    """CONT-13"""
    tools = a_state(1, current_step=a_last_step(has_tool_calls=True))
    criteria = ContinuationCriteria(
        StepsLimit(1), ToolCallPresenceCheck(), Says(ALLOW), forbidding(StopReason.GUARD), Raises()
    )
    outcome = criteria.evaluate(tools)
    assert ContinuationOutcome.from_json(outcome.to_json()) == outcome
    wire = outcome.to_dict()
    assert set(wire) == {"decision", "shouldContinue", "resolvedBy", "stopReason", "evaluations"}
    keys = {"criterion", "decision", "reason", "stopReason", "context"}
    for one in wire["evaluations"]:
        assert set(one) == keys | ({"traceback"} if one["criterion"] == "Raises" else set())
    assert ContinuationOutcome.model_validate(wire) == outcome


def test_an_outcome_has_all_fields_and_is_stored_in_one_order() -> None:
    outcome = ContinuationCriteria(StepsLimit(1), StepsLimit(2)).evaluate(STATE)
    for one in (outcome, *outcome.evaluations):
        assert vars(one).keys() == type(one).model_fields.keys()
    assert outcome.to_json() == (
        '{"stopReason":"steps_limit","evaluations":[{"stopReason":"steps_limit",'
        '"criterion":"StepsLimit","decision":"forbid",'
        '"reason":"steps: 1 has reached the limit of 1","context":{"value":1,"limit":1}},'
        '{"criterion":"StepsLimit","decision":"allow",'
        '"reason":"steps: 1 is below the limit of 2","context":{"value":1,"limit":2}}],'
        '"decision":"forbid","shouldContinue":false,"resolvedBy":"StepsLimit"}'
    )


OF_A_SET = st.one_of(
    st.builds(Says, DECISIONS),
    st.builds(lambda decision: when(lambda _: decision), DECISIONS),
    st.builds(StepsLimit, st.sampled_from([1, 2])),
    st.builds(Raises),
)


@given(st.lists(OF_A_SET, max_size=5))
def test_whether_a_set_forbids_is_what_its_outcome_says(
    criteria: list[CanDecideToContinue],
) -> None:
    of_them = ContinuationCriteria(*criteria)
    assert of_them.forbids(STATE) is (of_them.evaluate(STATE).decision is FORBID)
