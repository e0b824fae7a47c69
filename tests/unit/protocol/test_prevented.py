"""Whether a step's model call is made: what is looked at before it."""

from dataclasses import replace

import pytest
from support.runs.agent_records import a_state
from support.runs.seen_steps import a_claim

from stepfleet.orchestrator import AgentState, ContinuationCriteria, ContinuationDecision, when
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.guards import prevented

FORBID = ContinuationDecision.FORBID_CONTINUATION
ALLOW = ContinuationDecision.ALLOW_CONTINUATION
FIRST = a_claim()
RETRIED = replace(a_claim(), step=1, state=a_state(1), decided=True, attempts=1)


class Named:
    """A function of the user's that knows how often its name was read: for an explanation."""

    def __init__(self, says: ContinuationDecision) -> None:
        self.says = says
        self.called = 0
        self.explained = 0

    def __call__(self, _: AgentState) -> ContinuationDecision:
        self.called += 1
        return self.says

    @property
    def __name__(self) -> str:
        self.explained += 1
        return "named"


@pytest.mark.parametrize("claim", [FIRST, RETRIED], ids=["first", "retried"])
def test_before_a_call_that_is_made_criteria_are_asked_and_explain_nothing(claim: Claim) -> None:
    rule = Named(ALLOW)
    assert prevented(claim, ContinuationCriteria(when(rule))) is None
    assert (rule.called, rule.explained) == (1, 0)


@pytest.mark.parametrize("claim", [FIRST, RETRIED], ids=["first", "retried"])
def test_a_call_that_is_prevented_is_explained(claim: Claim) -> None:
    outcome = prevented(claim, ContinuationCriteria(when(Named(FORBID))))
    assert outcome is not None
    assert outcome.reason == "named says forbid"
