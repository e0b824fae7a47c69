"""How the pool ends its loop: collaborators have their say, then whatever runs is cancelled."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any, Self

import pytest

from stepfleet.worker.engine import bridge
from stepfleet.worker.engine.bridge import PerLoop
from stepfleet.worker.engine.loop_thread import LoopThread
from stepfleet.worker.engine.pool.asyncio_pool import _close_everything
from stepfleet.worker.runtime.worker import LAST_SECONDS, SETTLE_SECONDS
from stepfleet.worker.telemetry.instrumentation import LAST_SECONDS as TELEMETRY_SECONDS

LONG = 60.0


class Cleaning:
    """A task that runs until it is cancelled, and notes its clean-up."""

    def __init__(self) -> None:
        self.cleaned = False
        self.task = asyncio.create_task(self._work())

    @classmethod
    def beside(cls, per_loop: PerLoop[Any], thread: LoopThread) -> Self:
        """Begin in the thread's loop, where the collaborator is made first."""

        async def begin() -> Self:
            per_loop()
            made = cls()
            await asyncio.sleep(0)
            return made

        return asyncio.run_coroutine_threadsafe(begin(), thread.loop).result(LONG)

    async def _work(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cleaned = True


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("ends")
    thread.start()
    yield thread
    thread.stop(asyncio.sleep(0), within=LONG)


def test_a_collaborator_closes_while_its_own_tasks_still_run(thread: LoopThread) -> None:
    gate, told = asyncio.Event(), []

    async def tell() -> None:
        await gate.wait()
        told.append("all")

    async def settle(telling: asyncio.Task[None]) -> None:
        gate.set()
        await asyncio.wait([telling])

    per_loop = PerLoop(lambda: asyncio.create_task(tell()), settle)
    other = Cleaning.beside(per_loop, thread)
    thread.stop(_close_everything(), within=LONG)
    assert told == ["all"]
    assert other.cleaned


def test_a_collaborator_that_hangs_holds_up_neither_the_end_nor_the_others_clean_up(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bridge, "CLOSE_SECONDS", 0.05)

    async def hang(_: object) -> None:
        await asyncio.Event().wait()

    per_loop = PerLoop(object, hang)
    other = Cleaning.beside(per_loop, thread)
    began = time.monotonic()
    thread.stop(_close_everything(), within=LONG)
    assert time.monotonic() - began < LONG / 2
    assert other.cleaned
    assert "TimeoutError" in caplog.text


def test_what_settles_leaves_time_to_close() -> None:
    """Telemetry has its last word after that, and Redis may be away."""
    assert bridge.CLOSE_SECONDS >= SETTLE_SECONDS + TELEMETRY_SECONDS + LAST_SECONDS


class FatalError(BaseException):
    """What no `except Exception` catches; asyncio gives it to whoever awaits, like an exception."""


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), FatalError()], ids=repr)
def test_a_task_that_would_end_the_loop_ends_only_itself(
    thread: LoopThread, raised: BaseException
) -> None:
    """asyncio lets two of them end the loop, which would strand everything else in it."""

    async def fail() -> None:
        raise raised

    async def beside() -> str:
        task = asyncio.ensure_future(fail())
        await asyncio.wait([task])
        return repr(task.exception())

    said = asyncio.run_coroutine_threadsafe(beside(), thread.loop).result(LONG)
    assert said == repr(raised)
    assert thread.usable
