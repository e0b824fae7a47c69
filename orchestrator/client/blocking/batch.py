"""A batch for plain code. Holds no logic: `async_batch.AsyncBatch` does everything."""

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from stepfleet.orchestrator.client.batch import AsyncBatch, OnProgress
from stepfleet.orchestrator.client.portal import Portal
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.records.run.results import AgentRunResult


class Batch:
    """A batch; see `AsyncBatch` for what each verb does."""

    def __init__(
        self,
        batch: AsyncBatch,
        portal: Portal,
        find: Callable[[str], Coroutine[Any, Any, AsyncBatch]],
    ) -> None:
        self._known = batch
        self._portal = portal
        self._find = find
        self._forks = portal.forks

    @property
    def _batch(self) -> AsyncBatch:
        """The batch as this process reads it; found again where the process was forked."""
        if self._forks != self._portal.forks:
            here = self._portal.call(self._find(self._known.id))
            here.skipped, here.skipped_count = self._known.skipped, self._known.skipped_count
            self._known, self._forks = here, self._portal.forks
        return self._known

    @property
    def id(self) -> str:
        """The batch's id (UUID)."""
        return self._known.id

    @property
    def skipped(self) -> tuple[str, ...]:
        """What was wrong with the lines that this submission left out."""
        return self._known.skipped

    @property
    def skipped_count(self) -> int:
        """How many lines this submission left out."""
        return self._known.skipped_count

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

    def cancel(self, on_progress: OnProgress | None = None) -> int:
        """Cancel every run that has not ended."""
        return self._portal.call(self._batch.cancel(on_progress))

    def pause(self, on_progress: OnProgress | None = None) -> int:
        """Pause every run that has not ended."""
        return self._portal.call(self._batch.pause(on_progress))

    def resume(self, on_progress: OnProgress | None = None) -> int:
        """Take pauses back."""
        return self._portal.call(self._batch.resume(on_progress))

    def retry(
        self,
        on_progress: OnProgress | None = None,
        *,
        failed_only: bool = True,
        **overrides: Any,
    ) -> int:
        """Take runs that did not complete up again."""
        asked = self._batch.retry(on_progress, failed_only=failed_only, **overrides)
        return self._portal.call(asked)
