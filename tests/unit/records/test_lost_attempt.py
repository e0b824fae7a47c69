"""What calls of attempts that were not committed have cost, or may have."""

import pytest

from stepfleet.orchestrator import UsageStats
from stepfleet.orchestrator.protocol.lost_attempts import lost_use
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.records.usage import LostUse

PAID = {"tokens": 15, "cost_usd": 0.25}
NOTHING, ONE = LostUse(), LostUse(calls=1, tokens=15, cost_usd=0.25)


@pytest.mark.parametrize(
    ("fields", "costs"),
    [
        ({"kind": "deferred"}, NOTHING),
        ({"kind": "crash", "ambiguous": True}, LostUse(calls=1)),
        ({"kind": "failed", "ambiguous": True, **PAID}, ONE),
        ({"kind": "failed", **PAID}, ONE),
        ({"kind": "late", "ambiguous": True, **PAID}, ONE),
        ({"kind": "late", **PAID}, NOTHING),
        (
            {"kind": "retried", "usage": UsageStats(llm_calls=2), **PAID},
            ONE.model_copy(update={"calls": 2}),
        ),
    ],
)
def test_an_attempt_counts_by_what_may_have_been_paid(
    fields: dict[str, object], costs: LostUse
) -> None:
    """An answer that was known, and came late, is paid for in the step that has it."""
    lost = LostAttempt.model_validate({"step": 1, **fields})
    assert lost_use((lost, None)) == costs
    assert lost_use((lost, lost)) - lost_use((lost,)) == costs
