"""The calls that a checkpoint lists: each with the model that it was made with."""

import pytest
from support.runs.seen_steps import a_claim

from stepfleet.orchestrator import ContinuationCriteria, LLMResponse
from stepfleet.orchestrator.client.copies import cost_calls
from stepfleet.orchestrator.protocol.attempt import Answered, Span
from stepfleet.orchestrator.protocol.verdict import Facts, decide


@pytest.mark.parametrize("named", ["", "gpt-named-2026"])
def test_a_call_keeps_its_model_when_it_is_restored_under_another(named: str) -> None:
    claim = a_claim()
    answer = Answered(Span(claim.now, 0.5), LLMResponse(content="yes", model=named))
    verdict = decide(claim, answer, ContinuationCriteria(), Facts(claim.now))
    assert verdict.logged
    other = claim.config.model_copy(update={"model": "openai:other"})
    [call] = cost_calls(other, [verdict.logged.result])
    assert call.model_id == (named or claim.config.model)
