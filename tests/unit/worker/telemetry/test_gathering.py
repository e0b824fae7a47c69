"""What was seen goes on in a thread, in order and bounded."""

import threading

import pytest
from support.deadlines import wait_until

from stepfleet.orchestrator.protocol.claim import Refused
from stepfleet.worker.telemetry.export_queue import ExportQueue
from stepfleet.worker.telemetry.observations import RefusalObservation, Seen

EARLY, STALE = RefusalObservation(Refused.EARLY), RefusalObservation(Refused.STALE)


def test_all_takers_get_all_in_order_in_another_thread() -> None:
    """OBS-07"""
    taken: list[Seen] = []
    threads: set[str] = set()
    gathering = ExportQueue([taken.append, lambda _: threads.add(threading.current_thread().name)])
    gathering.start()
    gathering.offer(EARLY)
    gathering.offer(STALE)
    wait_until(lambda: len(taken) == 2, within=60)
    gathering.close()
    assert taken == [EARLY, STALE]
    assert threads == {"stepfleet-telemetry"}


def test_what_waits_at_the_end_is_passed_on() -> None:
    taken: list[Seen] = []
    gathering = ExportQueue([taken.append])
    gathering.offer(EARLY)
    gathering.start()
    gathering.close()
    assert taken == [EARLY]


def test_what_is_too_much_is_dropped_and_counted() -> None:
    """OBS-07: a taker that is slow costs no memory without bound, and no step."""
    gathering = ExportQueue([], most=2)
    for _ in range(5):
        gathering.offer(EARLY)
    assert gathering.dropped == 3


def test_a_taker_that_fails_is_logged_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken: list[Seen] = []

    def fail(_: Seen) -> None:
        raise RuntimeError("no luck")

    gathering = ExportQueue([fail, taken.append])
    gathering.offer(EARLY)
    gathering.start()
    gathering.close()
    assert taken == [EARLY]
    assert "could not be told" in caplog.text
