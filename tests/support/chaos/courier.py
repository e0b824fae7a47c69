"""Carries messages from the queue that a fleet writes to the one that its workers read.

On the way it loses some and delivers some twice. Knows nothing of what a message says.
"""

import random
import threading
from collections import Counter
from typing import Any, Self

import redis

WRITTEN, READ = "stepfleet", "chaos"
HEAVY = "heavy"
BROKER_KEYS = (WRITTEN, READ, HEAVY, "unacked", "unacked_index")
_PAUSE_SECONDS = 0.005


class Courier:
    """Runs in a thread; keeps at most `ahead` messages waiting in the queue that is read."""

    def __init__(self, url: str, seed: int, *, lost: float, twice: float, ahead: int) -> None:
        self.counts: Counter[str] = Counter()
        self._client = redis.Redis.from_url(url)
        self._draw = random.Random(seed)
        self._lost, self._twice, self._ahead = lost, twice, ahead
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=30)
        self._client.close()

    def wipe(self) -> None:
        """Delete everything that the broker holds."""
        waiting = self._client.lrange(READ, 0, -1)
        self.counts["wiped"] += len(waiting) + int(self._client.llen(WRITTEN))
        self.counts["wiped twice"] += len(waiting) - len(set(waiting))
        self._client.delete(*BROKER_KEYS)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                moved = self._carry()
            except (redis.ConnectionError, redis.TimeoutError):
                moved = 0
            if not moved:
                self._ended.wait(_PAUSE_SECONDS)

    def _carry(self) -> int:
        room = self._ahead - int(self._client.llen(READ))
        if room <= 0:
            return 0
        found: Any = self._client.rpop(WRITTEN, min(room, 50))
        messages: list[bytes] = found or []
        carried: list[bytes] = []
        for message in messages:
            drawn = self._draw.random()
            times = 0 if drawn < self._lost else 2 if drawn < self._lost + self._twice else 1
            self.counts[("lost", "once", "twice")[times]] += 1
            carried += [message] * times
        if carried:
            self._client.rpush(READ, *reversed(carried))
        return len(messages)
