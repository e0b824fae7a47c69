"""The end of a run as the run that has started it reads it."""

from support.runs.agent_records import a_result, a_step

from stepfleet.orchestrator import StopReason
from stepfleet.orchestrator.records.errors import refused_answer
from stepfleet.orchestrator.records.run.facts import last_error
from stepfleet.worker.runtime.links import run_end


def test_a_caller_reads_why_the_answer_below_was_refused() -> None:
    why = refused_answer("verdict: 'maybe' is no verdict")
    step = a_step().model_copy(update={"refused": why})
    result = a_result(StopReason.STEPS_LIMIT, steps=(step,), last_error=last_error([step]))
    assert why in (run_end(result).error or "")
