"""Failures are counted by cause, in bounded memory."""

from support.runs.agent_records import a_result

from stepfleet.orchestrator import Cause, FailedRun, StopReason
from stepfleet.orchestrator.batches import failures
from stepfleet.orchestrator.batches.failures import FailureCount, failure_of


def _run(number: int, text: str, *, step: int = 1, limit: int = 0) -> FailedRun:
    return FailedRun(
        run_id=f"r{number}",
        agent="clerk",
        model="m1" if number % 2 else "m2",
        stop_reason=StopReason.STEPS_LIMIT if limit else StopReason.ERROR,
        step=step,
        text=text,
        cause=Cause(kind="tool", tool="stock", text=text),
        limits={"max_steps": limit} if limit else {},
    )


def test_runs_are_counted_by_cause_step_model_and_stop_reason() -> None:
    count = FailureCount()
    for number in range(3):
        count.add(_run(number, "rare"))
    for number in range(3, 8):
        count.add(_run(number, "often", step=number // 6 + 1, limit=16 + number))
    found = count.failures("b1", 9)
    assert (found.not_completed, found.read, found.ungrouped) == (9, 8, 0)
    often, rare = found.groups
    assert [one.runs for one in (often, rare)] == [5, 3]
    assert (often.example.run_id, rare.example.run_id) == ("r3", "r0")
    assert often.steps == {1: 3, 2: 2}
    assert often.models == {"m1": 3, "m2": 2}
    assert often.stop_reasons == {"steps_limit": 5}
    assert often.limits == {"max_steps": 23}
    assert often.where == f"cause={often.cause.key}"


def test_causes_and_kinds_beyond_the_bound_are_counted_and_not_kept() -> None:
    count = FailureCount()
    for number in range(failures.MOST_GROUPS + 20):
        count.add(_run(number, f"error {'x' * number}"))
    for number in range(failures.MOST_KINDS + 20):
        count.add(_run(number, "error ", step=number))
    found = count.failures("b1", 1_000)
    assert len(found.groups) == failures.MOST_GROUPS
    assert found.ungrouped == 20
    assert len(found.groups[0].steps) == failures.MOST_KINDS
    assert found.groups[0].runs == failures.MOST_KINDS + 21


def test_a_long_text_is_cut_in_the_example() -> None:
    count = FailureCount()
    count.add(_run(1, "x" * 50_000))
    assert len(count.failures("b1", 1).groups[0].example.text) == failures.LONGEST


def test_a_result_is_a_failure_unless_it_completed() -> None:
    assert failure_of(a_result()) is None
    found = failure_of(a_result(StopReason.GUARD, error="cost: 3 USD"))
    assert found is not None
    assert (found.step, found.text, found.cause.text) == (2, "cost: 3 USD", "cost: # USD")
