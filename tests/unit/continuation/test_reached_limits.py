"""A limit ends a run where it prevented something; an answer in the last allowed step is one."""

from typing import Any, Literal

import pytest
from support.runs.agent_records import (
    START,
    a_busy_state,
    a_failed_state,
    a_last_step,
    a_state,
    an_info,
)

from stepfleet.orchestrator import (
    Agent,
    AgentState,
    ContinuationCriteria,
    ContinuationDecision,
    ErrorType,
    FinishReason,
    StopReason,
    UsageStats,
    when,
)
from stepfleet.orchestrator.agents.agent import criteria_of, criteria_without_code, reasoner_of
from stepfleet.orchestrator.continuation import (
    CumulativeExecutionTimeLimit,
    ExecutionTimeLimit,
    ResponseContentCheck,
    StepsLimit,
    base_criteria,
)
from stepfleet.orchestrator.records.outcome import RunAnswer

FORBID = ContinuationDecision.FORBID_CONTINUATION
LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any], StopReason, str]] = {
    "steps": ({"max_steps": 1}, {}, StopReason.STEPS_LIMIT, "steps: 1 of 1"),
    "tokens": (
        {"token_limit": 50},
        {"usage": UsageStats(total_tokens=60)},
        StopReason.TOKEN_LIMIT,
        "tokens: 60 of 50",
    ),
    "time": (
        {"time_limit": 60},
        {"info": an_info(execution_started_at=START).at(START.replace(minute=2))},
        StopReason.TIME_LIMIT,
        "time since start: 120 s of 60 s",
    ),
    "time in steps": (
        {"cumulative_timeout": 1.5},
        {"info": an_info().add_execution_time(2.0)},
        StopReason.TIME_LIMIT,
        "time in steps: 2 s of 1.5 s",
    ),
    "budget": (
        {"budget_usd": 0.5},
        {"cost_usd": 0.75},
        StopReason.GUARD,
        "cost: 0.75 USD of 0.5 USD",
    ),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_an_answer_completes_the_run_although_a_limit_is_reached(limit: str) -> None:
    """CONT-33"""
    config, spent, _, numbers = LIMITS[limit]
    outcome = base_criteria(**config).evaluate(a_state(1, **spent))
    assert (outcome.should_continue, outcome.stop_reason) == (False, StopReason.COMPLETED)
    assert outcome.resolved_by == "aggregate"
    told = [one for one in outcome.evaluations if one.decision is FORBID]
    assert [one.reason for one in told] == [f"{numbers}, nothing was left to do"]
    assert told[0].stop_reason is LIMITS[limit][2]


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_ends_a_run_that_has_called_tools(limit: str) -> None:
    """CONT-33"""
    config, spent, reason, _ = LIMITS[limit]
    outcome = base_criteria(**config).evaluate(a_busy_state(1, **spent))
    assert (outcome.should_continue, outcome.stop_reason) == (False, reason)
    assert "has reached the limit of" in outcome.reason


@pytest.mark.parametrize("limit", [one for one in LIMITS if one != "steps"])
def test_a_limit_that_was_reached_before_the_first_step_prevents_it(limit: str) -> None:
    """CONT-24, CONT-33"""
    config, spent, reason, _ = LIMITS[limit]
    assert base_criteria(**config).evaluate(a_state(0, **spent)).stop_reason is reason


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (a_state(1, stop_requested="enough"), StopReason.USER_REQUESTED),
        (a_failed_state(ErrorType.MODEL, 1), StopReason.ERROR),
        (
            a_state(1, current_step=a_last_step(finish_reason=FinishReason.LENGTH)),
            StopReason.FINISH_REASON,
        ),
    ],
)
def test_a_cancel_an_error_and_a_finish_reason_decide_beside_a_reached_limit(
    state: AgentState, reason: StopReason
) -> None:
    """CONT-33"""
    criteria = base_criteria(max_steps=1, finish_reasons=[FinishReason.LENGTH])
    assert criteria.evaluate(state).stop_reason is reason


def test_a_users_criterion_that_forbids_decides_as_ever() -> None:
    """CONT-33: only our own limits give way to an answer."""
    criteria = base_criteria(max_steps=1, extra=[when(lambda _: FORBID)])
    outcome = criteria.evaluate(a_state(1))
    assert (outcome.stop_reason, outcome.resolved_by) == (StopReason.GUARD, "CallableCriterion")


def test_a_driver_of_the_user_that_requests_more_is_stopped_by_the_limit() -> None:
    """CONT-33"""
    more = ResponseContentCheck(lambda _: True)
    outcome = base_criteria(max_steps=1, extra=[more]).evaluate(a_state(1))
    assert (outcome.stop_reason, outcome.resolved_by) == (StopReason.STEPS_LIMIT, "StepsLimit")


def test_a_limit_of_the_users_own_list_gives_way_to_an_answer_too() -> None:
    """CONT-33"""
    assert base_criteria(extra=[StepsLimit(1)]).evaluate(a_state(1)).stop_reason == "completed"


def test_a_limit_without_any_driver_ends_the_run() -> None:
    """CONT-33: nothing says that the work is done."""
    assert ContinuationCriteria(StepsLimit(1)).evaluate(a_state(1)).stop_reason == "steps_limit"


@pytest.mark.parametrize("kind", [CumulativeExecutionTimeLimit, ExecutionTimeLimit])
def test_a_limit_that_fails_by_itself_is_an_error_and_no_limit(kind: Any) -> None:
    """CONT-26, CONT-33"""
    broken = kind(1)
    broken.measure = lambda _: 1 / 0
    outcome = base_criteria(extra=[broken]).evaluate(a_state(1))
    assert outcome.stop_reason is StopReason.ERROR


def test_whether_a_limit_forbids_is_known_without_reasons() -> None:
    """CONT-05, CONT-33"""
    criteria = base_criteria(max_steps=1)
    assert not criteria.forbids(a_state(1))
    assert criteria.forbids(a_busy_state(1))


@pytest.mark.parametrize("mode", ["tool", "native"])
@pytest.mark.parametrize("final", [True, False])
def test_only_an_answer_by_its_contract_completes_a_run_in_its_last_step(
    mode: Literal["tool", "native"], final: bool
) -> None:
    """CONT-33: an unmet answer contract is stopped by the limit, in both modes."""
    schema = {"title": "Verdict", "type": "object", "properties": {"ok": {"type": "boolean"}}}
    agent = Agent("judge", model="openai:tiny", output_type=schema, answer_mode=mode, max_steps=1)
    criteria = criteria_of(agent.config, agent, reasoner_of(agent.config, agent))
    answer = RunAnswer(text="{}", structured={}, schema_name="Verdict", final=True)
    outcome = criteria.evaluate(a_state(1, answer=answer if final else None))
    assert outcome.stop_reason == ("completed" if final else "steps_limit")


def test_without_the_agents_code_a_limit_holds_as_if_work_were_left() -> None:
    """CONT-33: only the code knows whether more work was requested."""
    agent = Agent("clerk", model="openai:tiny", max_steps=1)
    assert criteria_of(agent.config, agent).evaluate(a_state(1)).stop_reason == "completed"
    assert criteria_without_code(agent.config).evaluate(a_state(1)).stop_reason == "steps_limit"
