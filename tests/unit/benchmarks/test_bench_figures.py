import math
import os
from dataclasses import replace

import pytest
from support.benchmarks import benchmark

from stepfleet.orchestrator.cli.terminal import screen

figures, readings = benchmark("bench_figures"), benchmark("readings")
BUSY, Counts, Ended, Figures = figures.BUSY, figures.Counts, figures.Ended, figures.Figures
Percentiles, assumptions, estimate = figures.Percentiles, figures.assumptions, figures.estimate
as_data, as_tables = figures.as_data, figures.as_tables
seconds_in, usage_of = readings.seconds_in, readings.usage_of

FIGURES = Figures(
    counts=Counts(runs=100, completed=100, steps=500, lost_attempts=0),
    workers=1,
    slots=1000,
    wall_seconds=5.0,
    ideal_seconds=4.0,
    mean_step_seconds=0.8,
    step_seconds=Percentiles(0.8, 1.0, 1.2),
    added_ms=Percentiles(200.0, 300.0, 400.0),
    worker_ms_per_step=1.4,
    redis_ms_per_step=0.2,
    model_ms_per_step=0.3,
    bytes_per_worker=100_000_000,
    redis_bytes_per_run=4000.0,
    model_share=0.03,
)


def test_percentiles_are_values_that_were_seen() -> None:
    assert Percentiles.of(range(1, 101)) == Percentiles(50, 95, 99)
    assert Percentiles.of([7.0]) == Percentiles(7.0, 7.0, 7.0)
    assert Percentiles.of([]) == Percentiles()


def test_what_a_step_adds_is_what_the_plan_does_not_explain() -> None:
    assert Ended(steps=(0.5, 0.5), seconds=1.2, planned=1.0).added == pytest.approx(0.1)


def test_many_slow_runs_need_slots_and_many_quick_ones_need_cpu() -> None:
    slow = estimate(replace(FIGURES, mean_step_seconds=99.8), 10_000)
    quick = estimate(FIGURES, 10_000)

    assert (slow.workers, slow.bound) == (10, "slots")
    assert quick.steps_per_second == pytest.approx(10_000)
    assert (quick.workers, quick.bound) == (math.ceil(10_000 * 0.0014 / BUSY), "CPU")
    assert quick.redis_cores == pytest.approx(2.0)
    assert quick.redis_bytes == 40_000_000


def test_no_fleet_is_estimated_without_a_worker() -> None:
    assert estimate(FIGURES, 1).workers == 1
    assert estimate(replace(FIGURES, mean_step_seconds=0, added_ms=Percentiles()), 1).workers == 1


def test_the_figures_as_data_have_rates_assumptions_and_the_machine() -> None:
    data = as_data(replace(FIGURES, estimates=(estimate(FIGURES, 1000),)))

    assert data["steps_per_second"] == 100.0
    assert data["wall_over_ideal"] == 1.25
    assert data["assumptions"] == assumptions(FIGURES)
    assert data["machine"]["cpus"] == os.cpu_count()
    assert data["estimates"][0]["concurrent"] == 1000


@pytest.mark.parametrize(("share", "is_said"), [(0.3, False), (0.95, True)])
def test_a_provider_that_was_too_busy_is_named(share: float, is_said: bool) -> None:
    console = screen()
    with console.capture() as captured:
        console.print(as_tables(replace(FIGURES, model_share=share)))

    assert ("simulated provider used" in captured.get()) is is_said
    assert "100 of 100" in captured.get()


def test_a_process_knows_its_own_cpu_time_and_memory() -> None:
    (before,) = usage_of([os.getpid()])
    while usage_of([os.getpid()])[0].cpu < before.cpu + 0.02:
        sum(range(10_000))

    assert before.memory > 1_000_000
    assert usage_of([]) == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("0:01.25", 1.25), ("01:02:03", 3723), ("2-00:00:01", 172_801)]
)
def test_times_are_read_as_ps_writes_them(text: str, seconds: float) -> None:
    assert seconds_in(text) == seconds
