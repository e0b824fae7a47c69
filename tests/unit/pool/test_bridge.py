"""The bridge outside the pool: one background loop per process, for any synchronous caller."""

import asyncio
import concurrent.futures
import contextvars
import os
import signal
import threading

import pytest
from greenlet import getcurrent  # type: ignore[import-untyped]

from stepfleet.worker import bridge
from stepfleet.worker.bridge import PerLoop, TaskGreenlet, await_, close_collaborators
from stepfleet.worker.loop_thread import LoopThread


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


def test_a_synchronous_caller_gets_the_result() -> None:
    assert await_(answer()) == 42


def test_callers_of_many_threads_share_one_loop() -> None:
    async def which() -> int:
        return id(asyncio.get_running_loop())

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        loops = set(threads.map(lambda _: await_(which()), range(50)))
    assert loops == {id(bridge.home_loop().loop)}


def test_an_exception_reaches_the_caller() -> None:
    async def explode() -> None:
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        await_(explode())


def test_leaving_the_process_reaches_the_caller_and_not_the_loop() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        await_(leave())
    assert await_(answer()) == 42


def test_a_coroutine_that_cancels_itself_is_an_ordinary_error() -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(concurrent.futures.CancelledError, match="cancelled itself"):
        await_(give_up())


async def test_a_coroutine_must_not_call_it() -> None:
    with pytest.raises(RuntimeError, match="use `await` there"):
        await_(answer())


def test_an_exception_raised_by_a_signal_cancels_the_coroutine_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bridge, "CLEANUP_SECONDS", 60.0)

    class TimeIsUpError(Exception):
        pass

    began, cleaned = threading.Event(), threading.Event()

    async def endless() -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.set()

    def interrupt(*_: object) -> None:
        raise TimeIsUpError

    def send() -> None:
        began.wait(60)
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, interrupt)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(TimeIsUpError):
            await_(endless())
        assert cleaned.is_set()
    finally:
        sender.join()
        signal.signal(signal.SIGUSR2, before)


def test_a_thread_that_waits_for_a_loop_that_ends_is_told() -> None:
    home = LoopThread("ends")
    home.start()
    bridge.adopt(home)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            began = threading.Event()

            async def endless() -> None:
                began.set()
                await asyncio.sleep(3600)

            waiting = threads.submit(await_, endless())
            assert began.wait(60)
            home.stop(asyncio.sleep(0), within=60)
            with pytest.raises(RuntimeError, match="event loop has ended"):
                waiting.result(60)
    finally:
        bridge.abandon(home)


def test_a_forked_child_has_a_loop_of_its_own() -> None:
    assert await_(answer()) == 42
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(await_(answer())).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "42"
    os.waitpid(child, 0)


def test_a_collaborator_is_made_once_per_loop_and_closed_with_it() -> None:
    closed: list[object] = []

    async def close(instance: object) -> None:
        closed.append(instance)

    per_loop: PerLoop[object] = PerLoop(object, close)

    async def twice() -> tuple[object, object]:
        return per_loop(), per_loop()

    first, second = LoopThread("first"), LoopThread("second")
    made = []
    for thread in (first, second):
        thread.start()
        one, two = asyncio.run_coroutine_threadsafe(twice(), thread.loop).result(60)
        assert one is two
        made.append(one)
    assert made[0] is not made[1]
    first.stop(close_collaborators(), within=60)
    assert closed == [made[0]]
    second.stop(close_collaborators(), within=60)
    assert closed == made
    assert not first.usable


def test_a_collaborator_outside_a_loop_is_refused() -> None:
    with pytest.raises(RuntimeError):
        PerLoop(object)()


def test_one_collaborator_that_cannot_be_closed_does_not_hold_up_the_others() -> None:
    closed: list[str] = []

    async def fail(_: object) -> None:
        raise OSError("gone")

    async def note(_: object) -> None:
        closed.append("other")

    bad, good = PerLoop(object, fail), PerLoop(object, note)

    async def run() -> list[BaseException]:
        good()
        bad()
        return await close_collaborators()

    failures = asyncio.run(run())
    assert [str(f) for f in failures] == ["gone"]
    assert closed == ["other"]


async def test_a_task_greenlet_shares_the_context_of_its_driver() -> None:
    colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")
    colour.set("outside")

    async def change() -> str:
        seen = colour.get()
        colour.set("inside")
        return seen

    def body() -> list[str]:
        return [colour.get(), await_(change()), colour.get()]

    greenlet = TaskGreenlet(body)
    asked = greenlet.switch()
    assert await_is_pending(greenlet)
    assert greenlet.switch(await asked) == ["outside", "outside", "inside"]


def await_is_pending(greenlet: TaskGreenlet) -> bool:
    return not greenlet.dead and getcurrent() is not greenlet
