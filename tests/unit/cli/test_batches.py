from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console, RenderableType

from stepfleet.orchestrator import AskCount, BatchProgress, Failures
from stepfleet.orchestrator.cli.batches import batch_list, summary
from stepfleet.orchestrator.cli.progress import (
    PLAIN_SECONDS,
    BatchPace,
    Display,
    Sample,
    picture,
    progress_line,
)
from stepfleet.orchestrator.cli.run import code_of


def progress(**fields: Any) -> BatchProgress:
    given = {
        "batch_id": "b1",
        "agent": "solver",
        "created": datetime(2026, 1, 1, tzinfo=UTC),
        "sealed": True,
        "total": 10,
        "queued": 3,
        "in_progress": 2,
        "completed": 4,
        "failed": 1,
        "steps": 12,
        "tokens": 3456,
        "cost_usd": 0.0123,
        "by_reason": {"completed": 4, "error": 1},
    }
    return BatchProgress(**{**given, **fields})


def text_of(renderable: RenderableType) -> str:
    console = Console(width=150, markup=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def pace() -> BatchPace:
    return BatchPace((Sample(0.0, 0, 0), Sample(10.0, 5, 12)))


def test_a_plain_line_has_counts_rate_tokens_cost_and_eta() -> None:
    line = progress_line(progress(), pace())

    assert line == (
        "5/10 done, 1 not completed, 2 in progress, 3 queued, 1.2 steps/s, 3,456 tokens, $0.0123, "
        "ETA 10 s"
    )


def test_the_live_picture_has_counts_rate_tokens_cost_and_eta() -> None:
    text = text_of(picture(progress(), pace(), elapsed=10.0))

    for part in (
        "5/10",
        "4 completed",
        "1 failed",
        "2 in progress",
        "3 queued",
        "1.2/s",
        "ETA 10 s",
    ):
        assert part in text


def test_the_summary_counts_by_status_and_by_stop_reason() -> None:
    none = Failures(batch_id="b1", not_completed=0, read=0)
    text = text_of(summary(progress(), none, wall_seconds=61.0))

    for part in ("completed", "stop reason error", "3,456", "$0.0123", "1 min 01 s"):
        assert part in text
    assert "Causes" not in text
    assert "for people" not in text


@pytest.mark.parametrize(
    ("asks", "says"),
    [
        (AskCount(count=1), "1 call waits for a person:"),
        (AskCount(count=3), "3 calls wait for people:"),
        (AskCount(count=1000, more=True), "1,000 or more calls wait for people:"),
        (AskCount(count=1, more=True), "1 or more calls wait for people:"),
    ],
)
def test_the_summary_counts_the_calls_that_wait_for_people(asks: AskCount, says: str) -> None:
    none = Failures(batch_id="b1", not_completed=0, read=0)
    lines = text_of(summary(progress(), none, asks)).splitlines()
    assert lines[-2:] == [says, "  stepfleet approvals --batch b1"]


def test_the_list_has_a_row_per_batch() -> None:
    text = text_of(batch_list([progress(), progress(batch_id="b2")]))

    assert "b1" in text
    assert "b2" in text


def test_without_a_terminal_a_line_appears_now_and_then_and_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter([0.0, 0.0, 1.0, PLAIN_SECONDS, PLAIN_SECONDS + 1])
    with Display(live=False, clock=lambda: next(times)) as display:
        display.update(progress())
        display.update(progress())
        display.update(progress())
        display.update(progress(), last=True)

    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 3
    assert not captured.out


def test_the_exit_code_is_zero_only_when_every_run_completed() -> None:
    assert code_of(completed=10, total=10) == 0
    assert code_of(completed=9, total=10) == 1
