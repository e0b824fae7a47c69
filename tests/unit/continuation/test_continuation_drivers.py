from typing import Any

import pytest
from support.runs.agent_records import a_failed_state, a_last_step, a_state, failures

from stepfleet.orchestrator import (
    AgentState,
    ContinuationCriteria,
    ContinuationDecision,
    ErrorHandlingDecision,
    ErrorPolicy,
    ErrorType,
    Message,
    Role,
    StopReason,
    when,
)
from stepfleet.orchestrator.continuation import (
    ErrorPolicyCriterion,
    PendingRetry,
    ResponseContentCheck,
    SelfCritique,
    StepsLimit,
    ToolCallPresenceCheck,
)
from stepfleet.orchestrator.records.steps import FinishReason, StepType

ALLOW = ContinuationDecision.ALLOW_CONTINUATION
REQUEST = ContinuationDecision.REQUEST_CONTINUATION
STOP = ContinuationDecision.ALLOW_STOP
FORBID = ContinuationDecision.FORBID_CONTINUATION
TOOLS = a_state(1, current_step=a_last_step(has_tool_calls=True))


def test_the_presence_check_asks_for_a_first_step_and_for_one_behind_tools() -> None:
    """CONT-20"""
    check = ToolCallPresenceCheck()
    assert check.decide(a_state(0)) is REQUEST
    assert check.decide(TOOLS) is REQUEST
    assert check.decide(a_state(1)) is STOP


def test_a_turn_that_its_provider_paused_goes_on() -> None:
    paused = a_state(1, current_step=a_last_step(finish_reason=FinishReason.PAUSE))
    evaluation = ToolCallPresenceCheck().explain(paused)
    assert (evaluation.decision, "paused" in evaluation.reason) == (REQUEST, True)


def test_the_first_step_of_a_second_turn_runs() -> None:
    """CONT-20, STATE-09: the session has steps, its new execution has none."""
    second_turn = a_state(0, session_steps=4, current_step=a_last_step())
    assert ToolCallPresenceCheck().decide(second_turn) is REQUEST


def test_pending_retry_asks_again_when_the_policy_retries() -> None:
    """CONT-29"""
    driver = PendingRetry(ErrorPolicy.retry_all(2))
    assert driver.decide(a_failed_state(ErrorType.MODEL, 1)) is REQUEST
    assert driver.decide(a_failed_state(ErrorType.MODEL, 2)) is STOP
    assert driver.decide(a_state(1)) is STOP
    assert driver.decide(a_state(0)) is STOP


def test_pending_retry_asks_nothing_when_the_policy_stops() -> None:
    """CONT-29"""
    assert PendingRetry(ErrorPolicy()).decide(a_failed_state(ErrorType.MODEL)) is STOP


def test_an_ignored_model_failure_is_asked_again_because_it_left_no_answer() -> None:
    """ERR-31"""
    policy = ErrorPolicy().with_handling(ErrorType.MODEL, ErrorHandlingDecision.IGNORE)
    assert PendingRetry(policy).decide(a_failed_state(ErrorType.MODEL, 9)) is REQUEST


def test_a_resolver_that_sees_a_failure_in_an_answer_gets_its_retry() -> None:
    """ERR-04, CONT-29"""
    driver = PendingRetry(ErrorPolicy.retry_all(3), lambda _: failures(ErrorType.VALIDATION, 1))
    assert driver.decide(a_state(1)) is REQUEST


def test_a_predicate_over_the_answers_text_asks_for_more() -> None:
    """CONT-21"""
    check = ResponseContentCheck(lambda text: "TODO" in text)
    assert check.decide(a_state(0)) is ALLOW
    assert check.decide(a_failed_state(ErrorType.MODEL)) is ALLOW
    assert check.decide(a_state(1, current_step=a_last_step(text="TODO: more"))) is REQUEST
    assert check.decide(a_state(1, current_step=a_last_step(text="done"))) is STOP


def test_a_function_becomes_a_criterion_with_its_name_in_the_reason() -> None:
    """CONT-21, CONT-28"""

    def out_of_office(state: AgentState) -> ContinuationDecision:
        return FORBID if state.step_count else ALLOW

    outcome = ContinuationCriteria(when(out_of_office)).evaluate(a_state(1))
    assert (outcome.resolved_by, outcome.stop_reason) == ("CallableCriterion", StopReason.GUARD)
    assert "out_of_office" in outcome.reason
    assert ContinuationCriteria(when(out_of_office)).can_continue(a_state(0))


def a_state_behind(*texts: str, **last: Any) -> AgentState:
    messages = (Message.user("q"), *(Message.assistant(text) for text in texts))
    step = a_last_step(text=texts[-1], **last)
    return a_state(len(texts), messages=messages, current_step=step)


def is_draft(text: str) -> bool:
    return text.startswith("draft")


def test_a_self_critique_asks_for_revisions_and_ends_with_retry_limit() -> None:
    """CONT-32"""
    critique = SelfCritique(is_draft, revisions=2)
    criteria = ContinuationCriteria(StepsLimit(10), ToolCallPresenceCheck(), critique)
    drafts = [criteria.evaluate(a_state_behind(*["draft"] * n)) for n in (1, 2, 3)]
    assert [one.should_continue for one in drafts] == [True, True, False]
    assert [one.resolved_by for one in drafts] == ["SelfCritique"] * 3
    assert drafts[2].stop_reason is StopReason.RETRY_LIMIT
    assert drafts[2].reason == "answer 3 is not good enough after 2 revisions"
    good = criteria.evaluate(a_state_behind("draft", "draft", "final"))
    assert good.stop_reason is StopReason.COMPLETED


def test_a_self_critique_judges_answers_alone() -> None:
    """CONT-32: neither tools, nor plans, nor failures, and each turn has its own revisions."""
    critique = SelfCritique(is_draft, revisions=1)
    for step_type in (StepType.TOOL_EXECUTION, StepType.PLANNING, StepType.ERROR):
        assert critique.decide(a_state_behind("draft", type=step_type)) is ALLOW
    assert critique.decide(a_state(0)) is ALLOW
    turns = a_state_behind("draft", "draft")
    asked = (*turns.messages, Message.user("again"), Message.assistant("draft"))
    assert critique.decide(turns) is FORBID
    assert critique.decide(turns.model_copy(update={"messages": asked})) is REQUEST
    nudge = Message(role=Role.USER, content="better", metadata={"added_by": "strategy"})
    nudged = (*asked, nudge, Message.assistant("draft"))
    assert critique.decide(turns.model_copy(update={"messages": nudged})) is FORBID


@pytest.mark.parametrize(
    "driver",
    [
        ToolCallPresenceCheck(),
        PendingRetry(ErrorPolicy.retry_all()),
        PendingRetry(ErrorPolicy()),
        when(lambda _: ALLOW),
    ],
    ids=lambda one: type(one).__name__,
)
def test_every_driver_explains_what_it_decides(driver: ToolCallPresenceCheck) -> None:
    """CONT-14, CONT-28"""
    for state in (a_state(0), a_state(1), TOOLS, a_failed_state(ErrorType.MODEL)):
        explained = driver.explain(state)
        assert explained.decision is driver.decide(state)
        assert explained.reason


@pytest.mark.parametrize("tools", [False, True])
def test_the_error_guard_explains_type_counts_limit_handling_and_tool(tools: bool) -> None:
    """ERR-16, ERR-15"""
    state = a_failed_state(ErrorType.TOOL, 2, tools=tools)
    named = state.failures.model_copy(update={"tool_name": "add", "total_failures": 5})
    guard = ErrorPolicyCriterion(ErrorPolicy.retry_tool_errors(3), lambda _: named)
    explained = guard.explain(state)
    assert explained.context == {
        "errorType": "tool",
        "consecutiveFailures": 2,
        "totalFailures": 5,
        "maxRetries": 3,
        "handling": "retry",
        "toolName": "add",
    }
    assert "tool went wrong" in explained.reason


@pytest.mark.parametrize(
    ("policy", "consecutive", "decision", "reason"),
    [
        (ErrorPolicy.stop_on_any_error(), 1, FORBID, StopReason.ERROR),
        (ErrorPolicy.retry_tool_errors(2), 1, ALLOW, None),
        (ErrorPolicy.retry_tool_errors(2), 2, FORBID, StopReason.RETRY_LIMIT),
        (ErrorPolicy.ignore_tool_errors(), 9, ALLOW, None),
    ],
)
def test_the_error_guard_forbids_on_stop_and_allows_retry_and_ignore(
    policy: ErrorPolicy,
    consecutive: int,
    decision: ContinuationDecision,
    reason: StopReason | None,
) -> None:
    """ERR-15, ERR-19"""
    guard = ErrorPolicyCriterion(policy)
    explained = guard.explain(a_failed_state(ErrorType.TOOL, consecutive))
    assert (explained.decision, explained.stop_reason) == (decision, reason)


def test_a_step_is_failed_by_its_type_alone() -> None:
    """STATE-11: an error step that called tools goes on through the presence check too."""
    state = a_failed_state(ErrorType.TOOL, tools=True)
    assert state.current_step is not None
    assert state.current_step.type is StepType.ERROR
    assert ToolCallPresenceCheck().decide(state) is REQUEST
