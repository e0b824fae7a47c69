import pytest

from stepfleet.orchestrator import ControlOutcome, ControlResult

LEFT_ALONE = {"active", "changed", "ended", "unknown"}


@pytest.mark.parametrize("outcome", ControlOutcome)
def test_every_outcome_follows_the_name_of_its_run(outcome: ControlOutcome) -> None:
    result = ControlResult(outcome, "2" if outcome in {"retried", "sent"} else "")

    assert str(result).split()[0] in {"was", "is", "has", "changed"}
    assert result.is_done is (outcome not in LEFT_ALONE)


def test_a_detail_is_a_step_or_a_state() -> None:
    assert str(ControlResult(ControlOutcome.RETRIED, "2")) == "is retried at step 3"
    assert str(ControlResult(ControlOutcome.RESUMED, "0")) == "was resumed at step 1"
    assert str(ControlResult(ControlOutcome.ENDED, "failed")) == "has already ended (failed)"


def test_a_retry_of_an_open_run_and_a_resume_of_one_that_goes_on_say_why() -> None:
    assert str(ControlResult(ControlOutcome.ACTIVE, "paused")) == "has not ended (paused)"
    assert str(ControlResult(ControlOutcome.ACTIVE)) == "is not paused"
