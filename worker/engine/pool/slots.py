"""Counts who may run: a fixed number of slots, and those who wait for one in order of arrival.

Decides who starts next. Must not know what a job is, nor how it is started.
"""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Slots(Generic[T]):
    """``limit`` slots; used from one thread at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running: set[T] = set()
        self.waiting: deque[T] = deque()

    def queue(self, job: T) -> None:
        """Let the job wait for a slot."""
        self.waiting.append(job)

    def take(self) -> T | None:
        """Give a free slot to the job that waits longest; None where no slot or no job is there."""
        if not self.waiting or len(self.running) >= self.limit:
            return None
        job = self.waiting.popleft()
        self.running.add(job)
        return job

    def free(self, job: T) -> None:
        """Take the job's slot back; repeating it is harmless."""
        self.running.discard(job)

    def drop_waiting(self) -> int:
        """Forget the jobs that have no slot; return how many they were."""
        count = len(self.waiting)
        self.waiting.clear()
        return count

    def resize(self, change: int) -> None:
        """Add slots, or remove them as they become free; raises ``ValueError`` below one slot."""
        if self.limit + change < 1:
            raise ValueError(
                f"the pool has {self.limit} slots and needs at least 1: shrink it by less than"
                f" {-change}, or stop the worker with `celery control shutdown`"
            )
        self.limit += change
