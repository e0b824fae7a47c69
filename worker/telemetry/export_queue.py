"""Takes what was seen off the event loop: a bounded queue, and a thread that passes it on.

What comes faster than it is taken is dropped and counted: being seen must not cost a step.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from stepfleet.worker.telemetry.observations import Seen

log = logging.getLogger(__name__)

MOST_WAITING = 10_000
PAUSE_SECONDS = 0.2

Take = Callable[[Seen], None]


class ExportQueue:
    """Passes what is offered to all `takers`, in order; at most `most` wait. `dropped` counts."""

    def __init__(self, takers: Sequence[Take], most: int = MOST_WAITING) -> None:
        self._takers = takers
        self._most = most
        self._waiting: deque[Seen] = deque()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="stepfleet-telemetry", daemon=True)
        self.dropped = 0

    def start(self) -> None:
        """Begin to pass on."""
        self._thread.start()

    def offer(self, seen: Seen) -> None:
        """Have `seen` passed on soon. Never waits."""
        if len(self._waiting) >= self._most:
            self.dropped += 1
        else:
            self._waiting.append(seen)

    def close(self) -> None:
        """Pass on what waits, and end. Blocks until then."""
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(PAUSE_SECONDS):
            self._pass_on()
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            seen = self._waiting.popleft()
            for take in self._takers:
                try:
                    take(seen)
                except Exception:
                    log.exception("what was seen of a step could not be told")
