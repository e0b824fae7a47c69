from datetime import UTC, datetime

import pytest
from rich.console import Console

from stepfleet.orchestrator import BatchProgress
from stepfleet.orchestrator.cli.progress import (
    WINDOW_SECONDS,
    BatchPace,
    Sample,
    picture,
    progress_line,
)
from stepfleet.orchestrator.records.calls.answers import AskCount


def test_a_single_sample_tells_no_rate_and_no_end() -> None:
    pace = BatchPace().with_sample(Sample(at=100.0, done=0, steps=0))

    assert pace.steps_per_second == 0
    assert pace.eta_seconds(10) is None


def test_the_end_is_what_is_open_over_the_rate_of_ended_runs() -> None:
    pace = BatchPace().with_sample(Sample(100.0, 0, 0)).with_sample(Sample(110.0, 20, 50))

    assert pace.steps_per_second == 5.0
    assert pace.eta_seconds(40) == 20.0


def test_nothing_open_takes_no_time() -> None:
    assert BatchPace().eta_seconds(0) == 0.0


def test_samples_older_than_the_window_do_not_count() -> None:
    pace = BatchPace().with_sample(Sample(0.0, 0, 0)).with_sample(Sample(10.0, 1000, 1000))
    pace = pace.with_sample(Sample(10.0 + WINDOW_SECONDS, 1030, 1030))

    assert pace.steps_per_second == 1.0


def test_runs_that_are_taken_up_again_make_no_negative_rate() -> None:
    pace = BatchPace().with_sample(Sample(0.0, 10, 10)).with_sample(Sample(1.0, 5, 5))

    assert pace.steps_per_second == 0
    assert pace.eta_seconds(5) is None


def batch(counts: dict[str, int]) -> BatchProgress:
    known = {"batch_id": "b", "created": datetime.now(UTC), "sealed": True, "total": 100}
    return BatchProgress.model_validate({**known, **counts})


PACE = BatchPace().with_sample(Sample(100.0, 0, 0)).with_sample(Sample(110.0, 20, 50))


@pytest.mark.parametrize(
    ("counts", "asks", "eta"),
    [
        ({"in_progress": 40, "queued": 40}, AskCount(), "ETA 40 s"),
        ({"in_progress": 40, "queued": 40}, AskCount(count=20), "ETA 30 s, 20 calls wait"),
        ({"in_progress": 40, "queued": 20, "paused": 20}, AskCount(count=20), "ETA 20 s, 20"),
        ({"in_progress": 2}, AskCount(count=5), "ETA -, 5 calls wait for people"),
        ({"paused": 2}, AskCount(), "ETA -"),
        ({"in_progress": 40}, AskCount(count=20, more=True), "ETA -, 20 or more calls wait"),
    ],
)
def test_runs_that_people_hold_have_no_end_that_is_known(
    counts: dict[str, int], asks: AskCount, eta: str
) -> None:
    assert eta in progress_line(batch(counts), PACE, asks)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(picture(batch(counts), PACE, 1.0, (), asks))
    assert eta.partition(",")[0] in captured.get()
