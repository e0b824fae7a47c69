"""The limits that a retry has to raise: above what the run has used, not only above themselves."""

from typing import Any

import pytest
from support.runs.agent_records import a_busy_state, an_info

from stepfleet.orchestrator import AgentConfig, UsageStats
from stepfleet.orchestrator.agents.agent import criteria_without_code
from stepfleet.orchestrator.client.control import ensure_resumable
from stepfleet.orchestrator.store.runs.reading import failed_run

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, float]]] = {
    "steps": ("steps_limit", {"max_steps": 3}, {}, {"max_steps": 6}),
    "tokens": (
        "token_limit",
        {"token_limit": 50},
        {"usage": UsageStats(total_tokens=400), "below_usage": UsageStats(total_tokens=100)},
        {"token_limit": 1_000},
    ),
    "time in steps": (
        "time_limit",
        {"cumulative_timeout": 1.5, "time_limit": None},
        {"info": an_info().add_execution_time(90.0)},
        {"cumulative_timeout": 180.0},
    ),
    "budget": (
        "guard",
        {"budget_usd": 0.1},
        {"cost_usd": 0.5, "below_cost_usd": 0.25},
        {"budget_usd": 1.5},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_retry_with_the_limits_of_a_failure_is_not_refused(case: str) -> None:
    """CONT-33: what `run` and `failures` advise would end at once again else."""
    reason, given, used, raised = CASES[case]
    config = AgentConfig(name="clerk", model="openai:tiny", **given)
    state = a_busy_state(3, **used)
    header = {"stop_reason": reason, "agent": "clerk", "step": "3", "slim": state.to_json()}
    limits = failed_run("r", header, config, None).limits
    assert limits == raised
    ensure_resumable("r", criteria_without_code(config.with_overrides(limits)), state, "retry")


def test_no_limit_is_raised_for_a_run_that_failed() -> None:
    header = {"stop_reason": "error", "agent": "clerk", "step": "1"}
    config = AgentConfig(name="clerk", model="openai:tiny")
    assert failed_run("r", header, config, None).limits == {}
