"""The bridge outside the pool: one background loop per process, for any synchronous caller."""

import asyncio
import concurrent.futures
import contextvars
import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable

import pytest
from greenlet import GreenletExit, getcurrent  # type: ignore[import-untyped]

from stepfleet.worker.engine import bridge
from stepfleet.worker.engine.bridge import (
    PerLoop,
    TaskGreenlet,
    await_,
    close_collaborators,
    idle_greenlet,
)
from stepfleet.worker.engine.loop_thread import LoopThread


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
            await asyncio.Event().wait()
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


def test_a_thread_that_waits_for_a_loop_that_ends_is_notified() -> None:
    home = LoopThread("ends")
    home.start()
    bridge.create(home)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            began = threading.Event()

            async def endless() -> None:
                began.set()
                await asyncio.Event().wait()

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

    assert await driven(body) == ["outside", "outside", "inside"]


async def test_a_task_greenlet_serves_one_body_after_the_other() -> None:
    """Each in its own driver's context; nothing of one stays for the next."""
    colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")
    greenlets: list[object] = []

    def body(name: str) -> str:
        greenlets.append(getcurrent())
        before = colour.get()
        colour.set(name)
        await_(asyncio.sleep(0))
        if name == "bad":
            raise LookupError(name)
        return f"{before} {colour.get()}"

    async def task(name: str) -> object:
        return await driven(lambda: body(name))

    assert await asyncio.create_task(task("red")) == "none red"
    with pytest.raises(LookupError, match="bad"):
        await asyncio.create_task(task("bad"))
    assert await asyncio.create_task(task("blue")) == "none blue"
    assert len(set(map(id, greenlets))) == 1


async def test_an_idle_greenlet_holds_nothing_of_what_it_has_done() -> None:
    class Held:
        """Something that can be referred to weakly."""

    held = Held()
    gone = weakref.ref(held)

    def body(given: Held) -> Held:
        await_(asyncio.sleep(0))
        return given

    await driven(functools.partial(body, held))
    del held
    assert gone() is None


async def test_greenlets_beyond_those_that_are_kept_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for a body cannot be collected as garbage."""
    monkeypatch.setattr(bridge, "MOST_IDLE", 0)
    greenlets: list[TaskGreenlet] = []

    def body() -> None:
        greenlets.append(getcurrent())
        await_(asyncio.sleep(0))

    for _ in range(2):
        await driven(body)
    assert [one.dead for one in greenlets] == [True, True]


async def test_idle_greenlets_end_with_their_loop() -> None:
    greenlets: list[TaskGreenlet] = []
    await driven(lambda: greenlets.append(getcurrent()))
    assert not greenlets[0].dead
    assert await close_collaborators() == []
    assert greenlets[0].dead


async def test_a_greenlet_that_is_killed_serves_no_other_body() -> None:
    cleaned: list[str] = []

    def body() -> None:
        try:
            await_(asyncio.sleep(0))
        finally:
            cleaned.append("up")

    greenlet = idle_greenlet()
    greenlet.begin(body).close()
    greenlet.throw(GreenletExit)
    assert cleaned == ["up"]
    assert greenlet.dead


async def driven(body: Callable[[], object]) -> object:
    greenlet = idle_greenlet()
    asked = greenlet.begin(body)
    while not greenlet.over:
        asked = greenlet.switch(await asked)
    return greenlet.outcome()
