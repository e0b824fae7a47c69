"""Workers as they last reported."""

import os
import socket
import subprocess
import sys
from typing import Any

import orjson
import pytest

from stepfleet.orchestrator.store.fleet.overview import (
    WorkerSeen,
    keeper_of,
    unserved_queues,
    workers_seen,
)


def report(**fields: object) -> str:
    told = {"seen": 100.0, "held": 2, "slots": 10, "agents": ["solver"], **fields}
    return orjson.dumps(told).decode()


def test_a_worker_that_reported_lately_is_alive() -> None:
    (seen,) = workers_seen({"elsewhere:5": report()}, now=104.0, lease=30)
    assert (seen.alive, seen.seen_seconds_ago, seen.held, seen.slots) == (True, 4.0, 2, 10)
    assert seen.agents == ("solver",)


def test_a_silent_worker_counts_as_gone() -> None:
    (seen,) = workers_seen({"elsewhere:5": report()}, now=116.0, lease=30)
    assert not seen.alive


def test_a_worker_that_is_silent_beyond_the_end_of_its_leases_holds_nothing() -> None:
    for ago, held in ((16.0, 2), (45.0, 2), (45.5, 0), (1200.0, 0)):
        (seen,) = workers_seen({"elsewhere:5": report()}, now=100.0 + ago, lease=30)
        assert (seen.alive, seen.held) == (False, held)


def test_a_worker_of_this_machine_whose_process_has_ended_is_gone_at_once() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = socket.gethostname()
    reports = {f"{host}:{ended.pid}": report(), f"{host}:{os.getpid()}": report()}
    found = {seen.name: seen.alive for seen in workers_seen(reports, now=101.0, lease=30)}
    assert found == {f"{host}:{ended.pid}": False, f"{host}:{os.getpid()}": True}


def worker(name: str, *, alive: bool = True, **told: Any) -> WorkerSeen:
    return WorkerSeen(name=name, seen_seconds_ago=1.0, alive=alive, **told)


def test_a_queue_is_unserved_when_tools_need_it_and_no_living_worker_serves_it() -> None:
    steps = worker("a", queues=("steps",), tool_queues=("gpu", "sound"))
    dead = worker("b", alive=False, queues=("gpu", "sound"))
    sound = worker("c", queues=("sound",))
    assert unserved_queues([steps, dead], "steps") == ("gpu", "sound")
    assert unserved_queues([steps, dead, sound], "steps") == ("gpu",)
    assert unserved_queues([sound], "steps") == ("steps",)
    assert unserved_queues([dead], "steps") == ()


def test_nothing_is_said_of_queues_where_a_worker_does_not_say_what_it_serves() -> None:
    """One of an earlier version."""
    steps = worker("a", queues=("steps",), tool_queues=("gpu",))
    assert unserved_queues([steps, worker("old")], "steps") == ()
    (old,) = workers_seen({"elsewhere:5": report()}, now=101.0, lease=30)
    assert (old.queues, old.tool_queues) == (None, ())


def test_what_a_later_report_has_more_is_read_as_far_as_it_is_known() -> None:
    """Reports of earlier and of later versions are beside each other while a fleet is updated."""
    started = "2026-11-23T08:00:00+00:00"
    new = report(schema=3, version="9.9", rss_bytes=1, stopping=True, started_at=started, x=[1])
    late, early = workers_seen({"a:5": new, "b:5": report()}, now=101.0, lease=30)
    assert (late.version, late.rss_bytes, late.stopping) == ("9.9", 1, True)
    assert late.started_at is not None
    assert late.started_at.isoformat() == started
    assert (early.version, early.rss_bytes, early.stopping) == ("", None, False)


@pytest.mark.parametrize(
    "text", ["not json", "[]", "7", '{"seen": "x"}', '{"slots": "many"}', "1e400"]
)
def test_a_report_that_cannot_be_read_is_one_of_a_silent_worker(text: str) -> None:
    """OPS-03: a keeper, and whoever looks at the fleet, go on."""
    reports = {"elsewhere:5": report(), "elsewhere:6": text}
    seen = {one.process: one for one in workers_seen(reports, now=101.0, lease=30)}
    assert {process: one.alive for process, one in seen.items()} == {
        "elsewhere:5": True,
        "elsewhere:6": False,
    }
    assert not keeper_of(seen["elsewhere:6"]).alive
