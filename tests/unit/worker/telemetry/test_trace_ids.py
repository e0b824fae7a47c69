"""Ids of traces and spans."""

from uuid import UUID, uuid4

import pytest

from stepfleet.worker.telemetry.span_plans import (
    is_sampled,
    new_span_id,
    run_span_id,
    sampled_part,
    step_span_id,
    trace_id,
)

RUN = "6ba7b810-9dad-41d1-80b4-00c04fd430c8"


def test_a_trace_has_the_id_of_its_run() -> None:
    """RUN-01, OBS-03: the same number, so that a run's trace is found by its id."""
    assert trace_id(RUN) == UUID(RUN).int
    assert f"{trace_id(RUN):032x}" == RUN.replace("-", "")


def test_an_id_that_is_no_uuid_has_a_trace_of_its_own() -> None:
    assert trace_id("run-1") != trace_id("run-2")
    assert 0 < trace_id("run-1") < 2**128


def test_every_worker_knows_the_spans_of_runs_and_waiting_steps() -> None:
    """OBS-03: derived from what a worker is given, and different for each."""
    ids = {
        run_span_id(RUN),
        run_span_id(RUN, 2),
        step_span_id(RUN, 1, 1),
        step_span_id(RUN, 1, 2),
        step_span_id(RUN, 2, 1),
        run_span_id(str(uuid4())),
    }
    assert len(ids) == 6
    assert f"{run_span_id(RUN):016x}" == "9d0289285311a3e7"
    assert all(0 < one < 2**64 for one in ids)
    assert new_span_id() != new_span_id()


@pytest.mark.parametrize(
    ("sampler", "argument", "part"),
    [
        ("", "", 1.0),
        ("always_on", "0", 1.0),
        ("always_off", "1", 0.0),
        ("parentbased_always_off", "", 0.0),
        ("traceidratio", "0.25", 0.25),
        ("parentbased_traceidratio", "0.25", 0.25),
        ("traceidratio", "many", 1.0),
    ],
)
def test_the_usual_variables_say_which_part_is_traced(
    sampler: str, argument: str, part: float
) -> None:
    given = {"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": argument}
    assert sampled_part(given) == part


def test_a_part_of_all_runs_is_traced_the_same_on_every_worker() -> None:
    """OBS-03: half a trace helps nobody."""
    runs = [str(UUID(int=n * 2**90 + n, version=4)) for n in range(2000)]
    traced = [run for run in runs if is_sampled(run, 0.25)]
    assert 400 < len(traced) < 600
    assert traced == [run for run in runs if is_sampled(run, 0.25)]
    assert not any(is_sampled(run, 0.0) for run in runs)
    assert all(is_sampled(run, 1.0) for run in runs)
