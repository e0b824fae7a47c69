"""Observations are exported by a thread, in order and bounded."""

import threading

import pytest
from support.deadlines import wait_until

from stepfleet.orchestrator.protocol.claim import Refused
from stepfleet.worker.telemetry.instrumentation import ExportQueue
from stepfleet.worker.telemetry.observations import Observation, RefusalObservation

EARLY, STALE = RefusalObservation(Refused.EARLY), RefusalObservation(Refused.STALE)


def test_all_exporters_get_all_in_order_in_another_thread() -> None:
    """OBS-07"""
    taken: list[Observation] = []
    threads: set[str] = set()
    queue = ExportQueue([taken.append, lambda _: threads.add(threading.current_thread().name)])
    queue.start()
    queue.offer(EARLY)
    queue.offer(STALE)
    wait_until(lambda: len(taken) == 2, within=60)
    queue.close()
    assert taken == [EARLY, STALE]
    assert threads == {"stepfleet-telemetry"}


def test_what_waits_at_the_end_is_passed_on() -> None:
    taken: list[Observation] = []
    queue = ExportQueue([taken.append])
    queue.offer(EARLY)
    queue.start()
    queue.close()
    assert taken == [EARLY]


def test_what_is_too_much_is_dropped_and_counted() -> None:
    """OBS-07: an exporter that is slow costs no memory without bound, and no step."""
    queue = ExportQueue([], most=2)
    for _ in range(5):
        queue.offer(EARLY)
    assert queue.dropped == 3


def test_an_exporter_that_fails_is_logged_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken: list[Observation] = []

    def fail(_: Observation) -> None:
        raise RuntimeError("no luck")

    queue = ExportQueue([fail, taken.append])
    queue.offer(EARLY)
    queue.start()
    queue.close()
    assert taken == [EARLY]
    assert "could not be exported" in caplog.text
