"""`result.debug()`: what a run came to, in short."""

from support.runs.agent_records import a_failed_state, a_failed_step, a_result, a_step

from stepfleet.orchestrator import ErrorType, Lifecycle, StopReason
from stepfleet.orchestrator.continuation import base_criteria


def test_it_says_how_far_a_run_came_and_why_it_stopped() -> None:
    """OBS-05"""
    outcome = base_criteria().evaluate(a_failed_state(ErrorType.MODEL))
    told = a_result(
        StopReason.ERROR,
        error="it failed",
        steps=(a_step(1), a_failed_step(2)),
        outcome=outcome,
    ).debug()
    assert (told.run_id, told.status, told.steps, told.max_iterations) == ("run-1", "error", 2, 10)
    assert (told.stop_reason, told.resolved_by) == ("error", "ErrorPolicyCriterion")
    assert (told.finish_reason, told.usage.total_tokens) == ("error", 40)
    assert [(one.step, one.errors[0].message) for one in told.errors] == [(2, "model error")]
    assert str(told) == (
        "run run-1 of solver: error\n"
        "steps: 2 of 10, lost attempts: 0\n"
        "stop reason: error, resolved by ErrorPolicyCriterion: it failed\n"
        "finish reason: error\n"
        "usage: 40 tokens, 2 calls, 0.000000 USD\n"
        "error in step 2: model (UNKNOWN_ERROR): model error"
    )


def test_a_run_that_has_not_begun_has_a_summary_too() -> None:
    """OBS-05"""
    waiting = a_result(
        lifecycle=Lifecycle.QUEUED, status=None, stop_reason=None, end_time=None, steps=()
    )
    assert "run-1 of solver: queued\n" in str(waiting.debug())
    assert waiting.debug().finish_reason is None
