"""Takes observations off the event loop: a bounded queue, and a thread that exports them.

What arrives faster than it is exported is dropped and counted: telemetry must not cost a step.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from stepfleet.worker.telemetry.observations import Observation

log = logging.getLogger(__name__)

MOST_WAITING = 10_000
PAUSE_SECONDS = 0.2

Export = Callable[[Observation], None]


class ExportQueue:
    """Passes observations to all `exporters`, in order; at most `most` wait. `dropped` counts."""

    def __init__(self, exporters: Sequence[Export], most: int = MOST_WAITING) -> None:
        self._exporters = exporters
        self._most = most
        self._waiting: deque[Observation] = deque()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="stepfleet-telemetry", daemon=True)
        self.dropped = 0

    def start(self) -> None:
        """Begin to export."""
        self._thread.start()

    def offer(self, observation: Observation) -> None:
        """Queue an observation. Never waits."""
        if len(self._waiting) >= self._most:
            self.dropped += 1
        else:
            self._waiting.append(observation)

    def close(self) -> None:
        """Export what waits, and end. Blocks until then."""
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(PAUSE_SECONDS):
            self._export()
        self._export()

    def _export(self) -> None:
        while self._waiting:
            observation = self._waiting.popleft()
            for export in self._exporters:
                try:
                    export(observation)
                except Exception:
                    log.exception("an observation of a step could not be exported")
