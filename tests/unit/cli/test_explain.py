from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from stepfleet.orchestrator import (
    AgentRunResult,
    ContinuationDecision,
    ContinuationEvaluation,
    ContinuationOutcome,
    ErrorType,
    LastError,
    Lifecycle,
    StopReason,
)
from stepfleet.orchestrator.cli.explain import (
    AwaitedTool,
    Explanation,
    dated,
    explained,
    explanation_picture,
)
from stepfleet.orchestrator.records.calls.answers import Ask
from stepfleet.orchestrator.records.run.results import end_state, run_status

FORBID = ContinuationDecision.FORBID_CONTINUATION
ALLOW = ContinuationDecision.ALLOW_CONTINUATION
STOP = ContinuationDecision.ALLOW_STOP
REQUEST = ContinuationDecision.REQUEST_CONTINUATION


def evaluation(
    criterion: str, decision: ContinuationDecision, **fields: Any
) -> ContinuationEvaluation:
    return ContinuationEvaluation(
        criterion=criterion, decision=decision, reason=f"{criterion} says {decision}", **fields
    )


def ended(reason: StopReason, outcome: ContinuationOutcome | None) -> AgentRunResult:
    return AgentRunResult(
        run_id="r1",
        agent_name="solver",
        lifecycle=end_state(reason),
        stop_reason=reason,
        status=run_status(reason),
        error="it broke" if run_status(reason).value == "error" else None,
        start_time=datetime.now(UTC),
        max_iterations=10,
        outcome=outcome,
    )


def active(lifecycle: Lifecycle, outcome: ContinuationOutcome | None = None) -> AgentRunResult:
    return AgentRunResult(
        run_id="r1",
        agent_name="solver",
        lifecycle=lifecycle,
        start_time=datetime.now(UTC),
        max_iterations=10,
        outcome=outcome,
    )


def rendered(explanation: Explanation) -> str:
    console = Console(width=200, markup=False)
    with console.capture() as captured:
        console.print(explanation_picture(explanation))
    return captured.get()


def forbidding(reason: StopReason) -> ContinuationOutcome:
    return ContinuationOutcome(
        decision=FORBID,
        should_continue=False,
        resolved_by="StepsLimit",
        stop_reason=reason,
        evaluations=(
            evaluation("TokenUsageLimit", ALLOW, context={"used": 30, "limit": 100}),
            evaluation(
                "StepsLimit", FORBID, context={"steps": 10, "limit": 10}, stop_reason=reason
            ),
            evaluation("BudgetLimit", FORBID, context={}),
        ),
    )


@pytest.mark.parametrize("reason", list(StopReason))
def test_every_stop_reason_is_explained_with_all_criteria_and_the_decisive_one(
    reason: StopReason,
) -> None:
    """CONT-28: every stopped run names criterion, reason and context."""
    found = explained(ended(reason, forbidding(reason)))

    assert found.stop_reason == reason.value
    assert [one.criterion for one in found.criteria] == [
        "TokenUsageLimit",
        "StepsLimit",
        "BudgetLimit",
    ]
    assert [one.decisive for one in found.criteria] == [False, True, False]
    text = rendered(found)
    assert reason.value in text
    assert "steps=10, limit=10" in text


def test_numbers_have_the_names_of_python_and_are_stored_as_they_were() -> None:
    judged = evaluation("ErrorPolicyCheck", FORBID, context={"errorCode": "TIMEOUT", "limit": 1})
    outcome = ContinuationOutcome(
        decision=FORBID, should_continue=False, resolved_by="x", evaluations=(judged,)
    )

    found = explained(ended(StopReason.ERROR, outcome))

    assert "error_code=TIMEOUT, limit=1" in rendered(found)
    assert found.to_dict()["criteria"][0]["numbers"] == {"errorCode": "TIMEOUT", "limit": 1}


def test_a_run_without_more_work_is_stopped_by_all_that_saw_none() -> None:
    outcome = ContinuationOutcome(
        decision=STOP,
        should_continue=False,
        resolved_by="aggregate",
        evaluations=(evaluation("A", STOP), evaluation("B", ALLOW), evaluation("C", STOP)),
    )

    found = explained(ended(StopReason.COMPLETED, outcome))

    assert [one.decisive for one in found.criteria] == [True, False, True]


def test_an_active_run_says_what_keeps_it_going() -> None:
    outcome = ContinuationOutcome(
        decision=REQUEST,
        should_continue=True,
        resolved_by="ToolCallPresenceCheck",
        evaluations=(evaluation("ToolCallPresenceCheck", REQUEST),),
    )

    found = explained(active(Lifecycle.IN_PROGRESS, outcome))

    assert found.says.startswith("in_progress")
    assert found.criteria[0].decisive


def test_a_queued_run_says_that_nothing_was_evaluated_yet() -> None:
    found = explained(active(Lifecycle.QUEUED))

    assert "no step has been evaluated yet" in found.says
    assert "queued" in rendered(found)


def test_a_run_that_waits_for_a_tool_says_whether_somebody_works_there() -> None:
    waits = (AwaitedTool("render", "gpu", served=False), AwaitedTool("play", "sound"))
    found = explained(active(Lifecycle.IN_PROGRESS), waits)
    text = rendered(found)
    assert "waits for tool 'render' on queue 'gpu', which no running worker serves" in text
    assert "waits for tool 'play' on queue 'sound'\n" in text.replace(" \n", "\n")
    told = found.to_dict()["awaited"][0]
    assert {name: told[name] for name in ("tool", "queue", "served")} == {
        "tool": "render",
        "queue": "gpu",
        "served": False,
    }


def test_a_run_that_waits_for_a_person_says_since_when_and_until_when() -> None:
    waits = (AwaitedTool("render", "gpu"), AwaitedTool("refund", "@approval", index=2))
    texts: dict[str, Any] = dict.fromkeys(
        ("run_id", "key", "call_id", "kind", "agent", "tool"), "x"
    )
    ask = Ask(
        **texts,
        step=1,
        index=2,
        since=datetime(2026, 1, 1, tzinfo=UTC),
        until=datetime(2026, 1, 2, tzinfo=UTC),
    )
    text = rendered(explained(active(Lifecycle.IN_PROGRESS), dated(waits, [ask])))
    times = "since 2026-01-01 00:00:00 UTC, until 2026-01-02 00:00:00 UTC"
    assert f"approval: `stepfleet approvals` (tool 'refund'), {times}" in " ".join(text.split())


def test_the_explanation_as_json_has_every_number() -> None:
    told = explained(ended(StopReason.STEPS_LIMIT, forbidding(StopReason.STEPS_LIMIT))).to_dict()

    assert told["resolved_by"] == "StepsLimit"
    assert told["criteria"][0]["numbers"] == {"used": 30, "limit": 100}


def test_markup_in_a_criterions_reason_is_shown_as_it_is() -> None:
    outcome = ContinuationOutcome(
        decision=FORBID,
        should_continue=False,
        resolved_by="Own",
        stop_reason=StopReason.GUARD,
        evaluations=(
            ContinuationEvaluation(criterion="Own", decision=FORBID, reason="[red]x[/]\x1b[2J"),
        ),
    )

    text = rendered(explained(ended(StopReason.GUARD, outcome)))

    assert "[red]x[/]" in text
    assert "\x1b[2J" not in text


def test_the_error_behind_a_limit_is_named_as_the_cause() -> None:
    error = LastError(
        type=ErrorType.TOOL,
        code="X",
        message="no such product 'gadgets'",
        tool_name="stock",
        step=8,
        failed_steps=8,
        steps=8,
    )
    result = ended(StopReason.STEPS_LIMIT, None).model_copy(
        update={"last_error": error, "line_id": "q-5", "batch_id": "b1"}
    )
    shown = rendered(explained(result))
    assert "Cause: tool 'stock' failed in 8 of 8 steps: no such product 'gadgets'" in shown
    assert "Line q-5 of batch b1" in shown
    old = error.model_copy(update={"failed_steps": 1, "good_steps": 5})
    assert explained(result.model_copy(update={"last_error": old})).cause is None
