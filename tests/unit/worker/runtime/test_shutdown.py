"""The stages of a worker's end, told through pipes, in this process and in forked children."""

import asyncio
import os
import signal
import threading
from functools import partial

import pytest
from support.deadlines import until, wait_until

from stepfleet.worker.runtime.shutdown import HAND_BACK_SECONDS, Notice, Stopping


@pytest.fixture
def told() -> list[str]:
    return []


def stay(seconds: float) -> None:
    """Do not end the test's own process."""
    del seconds


def connect(stopping: Stopping, told: list[str]) -> None:
    stopping.connect(lambda: told.append("drain"), lambda: told.append("hand back"))


async def what_is_ready() -> None:
    """Let the loop hear whatever it has been told, also what should not have been."""
    for _ in range(10):
        await asyncio.sleep(0)


async def eventually(told: list[str], *expected: str) -> None:
    async def is_so() -> bool:
        return told == list(expected)

    await until(is_so, within=60, what=f"{expected}")


async def test_the_first_signal_drains_and_the_second_hands_back(told: list[str]) -> None:
    """DIST-11"""
    stopping = Stopping(600.0, stay)
    stopping.open()
    connect(stopping, told)
    stopping.request()
    await eventually(told, "drain")
    stopping.request()
    await eventually(told, "drain", "hand back")
    stopping.request()
    stopping.begin()
    await what_is_ready()
    assert told == ["drain", "hand back"]


async def test_a_cold_stop_does_both_at_once(told: list[str]) -> None:
    stopping = Stopping(600.0, stay)
    stopping.open()
    connect(stopping, told)
    stopping.request(at_once=True)
    await eventually(told, "drain", "hand back")


async def test_who_listens_late_is_notified_as_well(told: list[str]) -> None:
    """A worker that is stopped while it starts, and a child that is forked later."""
    stopping = Stopping(600.0, stay)
    stopping.open()
    stopping.request()
    connect(stopping, told)
    await eventually(told, "drain")


async def test_a_signal_that_comes_while_the_first_is_heard_is_the_second(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers nest: the next signal's may run between any two lines of the first one's."""
    stopping = Stopping(600.0, stay)
    stopping.open()
    begin = stopping.begin

    def interrupted_begin() -> None:
        monkeypatch.setattr(stopping, "begin", begin)
        stopping.request()
        begin()

    monkeypatch.setattr(stopping, "begin", interrupted_begin)
    stopping.request()
    connect(stopping, told)
    await eventually(told, "drain", "hand back")


async def test_without_pipes_nothing_is_reported(told: list[str]) -> None:
    """In a process that is no worker."""
    stopping = Stopping(600.0, stay)
    connect(stopping, told)
    stopping.request()
    await what_is_ready()
    assert told == []


def test_the_bound_is_the_drain_and_the_time_to_hand_back() -> None:
    left: list[float] = []
    gone = threading.Event()

    def leave(seconds: float) -> None:
        left.append(seconds)
        gone.set()

    stopping = Stopping(-HAND_BACK_SECONDS, leave)
    stopping.open()
    stopping.begin()
    stopping.begin()
    assert gone.wait(60)
    assert left == [0.0]


def test_all_forked_children_hear_one_notice() -> None:
    notice = Notice()
    notice.open()
    children = {_forked_listener(notice) for _ in range(2)}
    try:
        notice.give()
        for child in tuple(children):
            assert wait_until(partial(_ended, child), within=60) == (child, 0)
            children.discard(child)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _ended(child: int) -> tuple[int, int] | None:
    """Return the child and its exit status; None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return (pid, status) if pid else None


def _forked_listener(notice: Notice) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        asyncio.new_event_loop().run_until_complete(_hearing(notice))
        code = 0
    finally:
        os._exit(code)


async def _hearing(notice: Notice) -> None:
    heard = asyncio.Event()
    notice.connect(heard.set)
    await heard.wait()
