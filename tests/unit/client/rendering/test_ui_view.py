"""A run in one piece for its window."""

from support.runs.agent_records import a_failed_state, a_failed_step, a_result, a_step
from support.runs.ui_records import two_steps

from stepfleet.orchestrator import ErrorType, RunView, StopReason
from stepfleet.orchestrator.client.rendering import ErrorBanner, rendered, view_of
from stepfleet.orchestrator.continuation import base_criteria


def test_a_failed_run_has_a_banner_a_history_and_its_criteria() -> None:
    """UI-08"""
    outcome = base_criteria().evaluate(a_failed_state(ErrorType.MODEL))
    result = a_result(
        StopReason.ERROR,
        error="the step failed",
        steps=(a_step(1), a_failed_step(2)),
        outcome=outcome,
    )
    view = view_of(result, rendered(two_steps()))
    assert view.banner == ErrorBanner(
        message="the step failed", type="model", code="UNKNOWN_ERROR", step=2
    )
    assert view.continuation == outcome
    assert len(view.messages) == 4
    assert RunView.model_validate(view.to_dict()) == view


def test_a_run_that_completed_has_no_banner() -> None:
    """UI-08"""
    view = view_of(a_result(), ())
    assert view.banner is None
    assert (view.status, view.stop_reason, view.usage.total_tokens) == (
        "completed",
        "completed",
        40,
    )


def test_a_failure_that_no_step_is_to_blame_for_is_reported_as_it_is() -> None:
    """UI-08: as when a run is ended before its first call."""
    view = view_of(a_result(StopReason.ERROR, error="three workers vanished", steps=()), ())
    assert view.banner == ErrorBanner(message="three workers vanished")
