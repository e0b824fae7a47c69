import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from support.deadlines import until, wait_until

from stepfleet.worker.toolbox.threads import ExpiredError, NoThreadFreeError, ToolThreads

LONG = 60.0


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets functions end that hang."""
    event = threading.Event()
    yield event
    event.set()


class Gauge:
    """Counts how many functions run at once."""

    def __init__(self, release: threading.Event) -> None:
        self.now = 0
        self.most = 0
        self._lock = threading.Lock()
        self._release = release

    def __call__(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self._release.wait(LONG)
        with self._lock:
            self.now -= 1


async def reached(check: Callable[[], bool]) -> None:
    async def answer() -> bool:
        return check()

    await until(answer, within=LONG)


async def test_no_more_functions_run_at_once_than_there_are_threads(
    release: threading.Event,
) -> None:
    threads, gauge = ToolThreads(3), Gauge(release)
    calls = [asyncio.create_task(threads.run(gauge, timeout=LONG)) for _ in range(10)]
    await reached(lambda: gauge.now == 3 and threads.waiting == 7)
    release.set()
    await asyncio.gather(*calls)
    assert gauge.most == 3
    threads.close()


async def test_each_call_of_a_burst_gets_a_thread_though_few_are_sent_for(
    release: threading.Event,
) -> None:
    threads, gauge = ToolThreads(12), Gauge(release)
    for _ in range(2):  # of new threads, and of idle ones
        calls = [asyncio.create_task(threads.run(gauge, timeout=LONG)) for _ in range(12)]
        await reached(lambda: gauge.now == 12)
        release.set()
        await asyncio.gather(*calls)
        await reached(lambda: threads._idle == 12)
        release.clear()
    threads.close()


async def test_where_the_system_gives_no_more_threads_the_others_take_the_calls(
    release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads, gauge = ToolThreads(2), Gauge(release)
    first = asyncio.create_task(threads.run(gauge, timeout=LONG))
    await reached(lambda: gauge.now == 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        second = asyncio.create_task(threads.run(gauge, timeout=LONG))
        await reached(lambda: threads.waiting == 1)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await ToolThreads(1).run(gauge, timeout=LONG)
    release.set()
    await asyncio.gather(first, second)
    assert gauge.most == 1
    threads.close()


async def test_threads_are_used_again() -> None:
    threads = ToolThreads(8)
    seen: set[int] = set()
    for _ in range(20):
        seen.add(await threads.run(threading.get_ident, timeout=LONG))
        # A result is there a moment before its thread is free for the next call.
        await reached(lambda: threads._idle == 1)
    assert len(seen) == 1
    threads.close()


async def test_functions_that_hang_are_replaced_up_to_the_spare_threads(
    release: threading.Event,
) -> None:
    """TOOL-16: hung threads cannot starve the rest."""
    threads = ToolThreads(1, spare=2, start_timeout=LONG)
    for hung in (1, 2):
        with pytest.raises(ExpiredError):
            await threads.run(lambda: release.wait(LONG), timeout=0.05)
        assert threads.hung == hung
        assert await threads.run(lambda: "alive", timeout=LONG) == "alive"
    with pytest.raises(ExpiredError):
        await threads.run(lambda: release.wait(LONG), timeout=0.05)
    # Short only where no thread can be free: a busy machine may need as long to start one.
    threads._start_timeout = 0.2
    with pytest.raises(NoThreadFreeError, match=r"within 0.2 s; 3 of 3 run functions that hang"):
        await threads.run(lambda: "starved", timeout=LONG)
    threads._start_timeout = LONG
    release.set()
    wait_until(lambda: threads.hung == 0, within=LONG, what="the end of the hung threads")
    assert await threads.run(lambda: "alive again", timeout=LONG) == "alive again"
    threads.close()


async def test_the_wait_for_a_thread_does_not_count_as_the_function_s_time(
    release: threading.Event,
) -> None:
    """TOOL-16: a busy worker times nobody out who has not run."""
    threads, gauge, ran = ToolThreads(1), Gauge(release), threading.Event()
    first = asyncio.create_task(threads.run(gauge, timeout=LONG))
    await reached(lambda: gauge.now == 1)
    second = asyncio.create_task(threads.run(ran.set, timeout=0.1))
    done, _ = await asyncio.wait({second}, timeout=0.4)
    assert not done
    release.set()
    await first
    # Once it runs its time counts, and a busy machine may need more than that for it.
    await asyncio.wait({second})
    await reached(ran.is_set)
    threads.close()


async def test_a_call_that_is_cancelled_while_it_waits_never_runs(
    release: threading.Event,
) -> None:
    threads, gauge, runs = ToolThreads(1), Gauge(release), list[int]()
    first = asyncio.create_task(threads.run(gauge, timeout=LONG))
    await reached(lambda: gauge.now == 1)
    second = asyncio.create_task(threads.run(lambda: runs.append(1), timeout=LONG))
    await reached(lambda: threads.waiting == 1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert threads.waiting == 0
    release.set()
    await first
    await threads.run(lambda: None, timeout=LONG)
    assert (runs, threads.hung) == ([], 0)
    threads.close()


def test_one_pool_serves_several_event_loops_in_several_threads() -> None:
    threads, results = ToolThreads(2), list[int]()

    async def squares() -> list[int]:
        return [await threads.run(lambda n=n: n * n, timeout=LONG) for n in range(50)]  # type: ignore[misc]

    loops = [
        threading.Thread(target=lambda: results.append(sum(asyncio.run(squares()))))
        for _ in range(4)
    ]
    for one in loops:
        one.start()
    for one in loops:
        one.join(LONG)
    assert results == [sum(n * n for n in range(50))] * 4
    threads.close()


async def test_closed_threads_take_no_calls() -> None:
    threads = ToolThreads(1)
    assert await threads.run(lambda: 1, timeout=LONG) == 1
    threads.close()
    with pytest.raises(RuntimeError, match="this worker is ending"):
        await threads.run(lambda: 1, timeout=LONG)


def test_a_function_that_hangs_for_ever_does_not_keep_the_process_from_ending() -> None:
    """TOOL-16: shutdown is not held up, nor by a loop that is gone when the function ends."""
    code = """
import asyncio, threading
from stepfleet.worker.toolbox.threads import ExpiredError, ToolThreads
threads, short = ToolThreads(2), threading.Event()
async def main():
    for hang in (threading.Event(), short):
        try:
            await threads.run(hang.wait, timeout=0.05)
        except ExpiredError:
            print("expired")
asyncio.run(main())
short.set()
while threads.hung > 1:
    pass
print("end")
"""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=True,
    )
    assert (ended.stdout.split(), ended.stderr) == (["expired", "expired", "end"], "")
