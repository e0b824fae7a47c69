"""What Celery, and so Flower, is told of a tool task."""

from datetime import UTC, datetime

import pytest
from celery.exceptions import Reject

from stepfleet.orchestrator import ToolCall, ToolCallRecord
from stepfleet.orchestrator.protocol.attempt import gave_up
from stepfleet.orchestrator.protocol.claim import Refusal, Refused, Work
from stepfleet.worker.step import Report
from stepfleet.worker.tasks import ISOLATED, CallFailed, outcome

HINT = Work("run", 0, 0)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
DONE = ToolCallRecord(tool_name="measure", call_id="c0", result="done", timestamp=NOW)


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (Report(HINT, record=DONE, applied=True), "delivered"),
        (Report(HINT, record=DONE), "dropped: nobody waits for the result any more"),
        (Report(HINT), "given back: the worker is stopping"),
        (Report(HINT, isolated=True), ISOLATED),
        (Report(HINT, refusal=Refusal(Refused.STALE)), "dropped: stale"),
    ],
)
def test_what_became_of_a_tool_task_is_reported_in_words(report: Report, told: str) -> None:
    assert outcome(report) == told


def test_a_call_that_failed_is_a_failed_task() -> None:
    call = ToolCall(id="c0", name="measure", arguments={})
    report = Report(HINT, record=gave_up(call, NOW, 3), applied=True)
    with pytest.raises(CallFailed, match="'measure' ended its worker 3 times"):
        outcome(report)


def test_what_a_stopping_worker_does_not_take_goes_back_into_the_queue() -> None:
    with pytest.raises(Reject):
        outcome(Report(HINT, refusal=Refusal(Refused.DRAINING)))
