"""What a lost model call may have cost, told by the call that was made in its place."""

from datetime import UTC, datetime

from stepfleet.orchestrator import StepResult, UsageStats
from stepfleet.orchestrator.records.run.results import LostAttempt

USAGE = UsageStats(prompt_tokens=10, completion_tokens=5, total_tokens=15)
STEPS = (
    StepResult(step=1, usage=USAGE, cost_usd=0.25, started_at=datetime(2026, 1, 1, tzinfo=UTC)),
    StepResult(step=2, started_at=datetime(2026, 1, 1, tzinfo=UTC)),
)
CRASH = LostAttempt(kind="crash", step=1, ambiguous=True)


def test_an_ambiguous_call_is_estimated_by_the_committed_one() -> None:
    priced = CRASH.estimated_by(STEPS)
    assert (priced.tokens, priced.cost_usd, priced.estimated) == (15, 0.25, True)


def test_a_known_cost_stays_as_it_is() -> None:
    late = CRASH.model_copy(update={"kind": "late", "cost_usd": 0.5, "tokens": 3})
    assert late.estimated_by(STEPS) == late


def test_an_attempt_without_a_call_has_no_cost() -> None:
    deferred = LostAttempt(kind="deferred", step=1)
    assert deferred.estimated_by(STEPS) == deferred


def test_without_a_committed_step_or_its_usage_nothing_is_estimated() -> None:
    for number in (2, 3):
        lost = CRASH.model_copy(update={"step": number})
        assert lost.estimated_by(STEPS) == lost
