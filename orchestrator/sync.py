"""The fleet for plain code: the same verbs, each run in one event loop of a thread of its own.

Holds no logic: `fleet.AsyncFleet` does everything.
"""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from stepfleet.orchestrator.agent import Agent
from stepfleet.orchestrator.async_batch import AsyncBatch
from stepfleet.orchestrator.batch_input import Given
from stepfleet.orchestrator.batches import BatchProgress
from stepfleet.orchestrator.fleet import AsyncFleet, Input
from stepfleet.orchestrator.overview import FleetOverview
from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.records.results import AgentRunResult
from stepfleet.orchestrator.run_control import CANCEL_NOTE
from stepfleet.orchestrator.settings import Settings
from stepfleet.orchestrator.store.control import Answer
from stepfleet.orchestrator.store.reading import StoredRun

T = TypeVar("T")
_CLOSING_SECONDS = 30.0


class Portal:
    """One event loop in a daemon thread, for calls from anywhere else.

    Ends, after `closing`, when it is closed, collected, or the interpreter ends.
    """

    def __init__(self, closing: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(
            target=self._loop.run_forever, name="stepfleet-client", daemon=True
        )
        thread.start()
        self.close = weakref.finalize(self, _end, self._loop, thread, closing)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns; an interrupt of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def each(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items of an asynchronous iterator."""
        try:
            while (found := self.call(_next(items))) is not None:
                yield found[0]
        finally:
            self.call(items.aclose())


async def _next(items: AsyncGenerator[T, None]) -> tuple[T] | None:
    async for item in items:
        return (item,)
    return None


def _end(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    closing: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    async def end() -> None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(closing(), _CLOSING_SECONDS)
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
    # Garbage may be collected in the loop's own thread, which cannot wait for itself.
    if thread is not threading.current_thread():
        thread.join(_CLOSING_SECONDS)
        if not thread.is_alive():
            loop.close()


class Batch:
    """A batch; see `AsyncBatch` for what each verb does."""

    def __init__(self, batch: AsyncBatch, portal: Portal) -> None:
        self._batch = batch
        self._portal = portal

    @property
    def id(self) -> str:
        """The batch's id (UUID)."""
        return self._batch.id

    @property
    def skipped(self) -> tuple[str, ...]:
        """What was wrong with the lines that this submission left out."""
        return self._batch.skipped

    @property
    def skipped_count(self) -> int:
        """How many lines this submission left out."""
        return self._batch.skipped_count

    def progress(self) -> BatchProgress:
        """Return how far the batch is."""
        return self._portal.call(self._batch.progress())

    def results(
        self, *, ordered: bool = False, follow: bool = True, failed: bool = False
    ) -> Iterator[AgentRunResult]:
        """Yield results as runs end, or in the order of the lines."""
        found = self._batch.results(ordered=ordered, follow=follow, failed=failed)
        return self._portal.each(found)

    def wait(self, timeout: float | None = None) -> BatchProgress:
        """Return the progress when all runs have ended; `TimeoutError` after `timeout` seconds."""
        return self._portal.call(self._batch.wait(timeout))

    def cancel(self) -> int:
        """Cancel every run that has not ended."""
        return self._portal.call(self._batch.cancel())

    def pause(self) -> int:
        """Pause every run that has not ended."""
        return self._portal.call(self._batch.pause())

    def resume(self) -> int:
        """Take pauses back."""
        return self._portal.call(self._batch.resume())

    def retry(self, *, failed_only: bool = True, **overrides: Any) -> int:
        """Take runs that did not complete up again."""
        return self._portal.call(self._batch.retry(failed_only=failed_only, **overrides))


class Fleet:
    """A fleet as its client sees it; see `AsyncFleet` for what each verb does.

    Use it as a context manager, or `close` it; one that is forgotten is closed when it is
    collected or the interpreter ends.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        broker_url: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._fleet = AsyncFleet(redis_url, broker_url=broker_url, settings=settings)
        self._portal = Portal(self._fleet.aclose)

    def __enter__(self) -> Self:
        self.check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect."""
        self._portal.close()

    def check(self) -> None:
        """Make sure that Redis answers and lets us in."""
        self._portal.call(self._fleet.check())

    def warnings(self) -> list[str]:
        """Return what about the Redis server endangers runs."""
        return self._portal.call(self._fleet.warnings())

    def overview(self) -> FleetOverview:
        """Return what is going on."""
        return self._portal.call(self._fleet.overview())

    def submit(
        self,
        agent: Agent | str,
        input: Input,  # noqa: A002 - the public name
        *,
        run_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        delay: float = 0.0,
        **overrides: Any,
    ) -> str:
        """Submit one run and return its id."""
        options = {"run_id": run_id, "metadata": metadata, "delay": delay, **overrides}
        return self._portal.call(self._fleet.submit(agent, input, **options))

    def run_with_steps(
        self,
        agent: Agent | str,
        input: Input,  # noqa: A002 - the public name
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> AgentRunResult:
        """Submit one run, wait for its end and return its result, however it ended."""
        work = self._fleet.run_with_steps(agent, input, timeout=timeout, **options)
        return self._portal.call(work)

    def run(self, agent: Agent | str, prompt: str, **options: Any) -> str:
        """Submit one run, wait for its end and return its text."""
        return self._portal.call(self._fleet.run(agent, prompt, **options))

    def run_with_messages(
        self, agent: Agent | str, messages: Sequence[Message | Mapping[str, Any]], **options: Any
    ) -> str:
        """Do as `run`, from a conversation instead of a prompt."""
        return self._portal.call(self._fleet.run_with_messages(agent, messages, **options))

    def submit_batch(
        self,
        source: Given,
        agent: Agent | str | None = None,
        *,
        agents: Mapping[str, Agent] | None = None,
        idempotency_key: str | None = None,
        skip_invalid: bool = False,
        name: str | None = None,
        on_progress: Callable[[int], None] | None = None,
        **overrides: Any,
    ) -> Batch:
        """Submit a batch: a JSONL file, `-` for standard input, or dicts.

        `on_progress` is called in another thread.
        """
        work = self._fleet.submit_batch(
            source,
            agent,
            agents=agents,
            idempotency_key=idempotency_key,
            skip_invalid=skip_invalid,
            name=name,
            on_progress=on_progress,
            **overrides,
        )
        return Batch(self._portal.call(work), self._portal)

    def batch(self, batch_id: str) -> Batch:
        """Return a submitted batch."""
        return Batch(self._portal.call(self._fleet.batch(batch_id)), self._portal)

    def batches(self, limit: int = 50) -> list[BatchProgress]:
        """Return the progress of the newest batches."""
        return self._portal.call(self._fleet.batches(limit))

    def show(self, run_id: str) -> StoredRun:
        """Return all that is stored of a run."""
        return self._portal.call(self._fleet.show(run_id))

    def result(self, run_id: str) -> AgentRunResult:
        """Return a run's result, as far as it has come."""
        return self._portal.call(self._fleet.result(run_id))

    def wait(self, run_id: str, timeout: float | None = None) -> AgentRunResult:
        """Return a run's result when it has ended; `TimeoutError` after `timeout` seconds."""
        return self._portal.call(self._fleet.wait(run_id, timeout))

    def events(self, run_id: str, *, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Yield a run's events in order."""
        return self._portal.each(self._fleet.events(run_id, follow=follow))

    def cancel(self, run_id: str, note: str = CANCEL_NOTE) -> Answer:
        """Cancel a run."""
        return self._portal.call(self._fleet.cancel(run_id, note))

    def pause(self, run_id: str) -> Answer:
        """Pause a run at its next step boundary."""
        return self._portal.call(self._fleet.pause(run_id))

    def resume(self, run_id: str) -> Answer:
        """Take a pause back."""
        return self._portal.call(self._fleet.resume(run_id))

    def retry(self, run_id: str, **overrides: Any) -> Answer:
        """Take an ended run up again at its failed step."""
        return self._portal.call(self._fleet.retry(run_id, **overrides))

    def send(self, run_id: str, text: str, **overrides: Any) -> Answer:
        """Give an ended run a further user message."""
        return self._portal.call(self._fleet.send(run_id, text, **overrides))
