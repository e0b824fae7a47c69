"""Clients that cancel, pause, resume, retry and go on with runs while the fleet works."""

import random
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Self

from stepfleet.orchestrator import AgentException, Fleet

VERBS = ("pause", "pause", "cancel", "resume", "resume", "retry", "send", "send")
MOST_SENT = 2
MOST_LOOKS = 8


class Meddler:
    """A thread with a client of its own: about one request every `pause` seconds."""

    def __init__(self, url: str, seed: int, pause: float) -> None:
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._run_ids: list[str] = []
        self._known: set[str] = set()
        self._paused: list[str] = []
        self._cancelled: list[str] = []
        self._sent: Counter[str] = Counter()
        self._url = url
        self._draw = random.Random(seed)
        self._pause = pause
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def learn(self, run_ids: Iterable[str]) -> None:
        """Meddle with these runs too."""
        self._run_ids += [one for one in run_ids if one not in self._known]
        self._known.update(self._run_ids)

    def end(self) -> None:
        """Ask for nothing more."""
        self._ended.set()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        with Fleet(self._url) as fleet:
            while not self._ended.wait(self._pause * self._draw.uniform(0.5, 1.5)):
                if self._run_ids:
                    self._ask(fleet)

    def _ask(self, fleet: Fleet) -> None:
        verb = self._draw.choice(VERBS)
        try:
            word = self._answer(fleet, verb)
        except AgentException as error:
            self.refused[type(error).__name__] += 1
        else:
            if word:
                self.counts[f"{verb}: {word}"] += 1

    def _answer(self, fleet: Fleet, verb: str) -> str:
        # The newest ones are most likely at work.
        run_id = self._draw.choice(self._run_ids[-60:])
        if verb == "pause":
            self._paused.append(run_id)
            return fleet.runs.pause(run_id).outcome
        if verb == "cancel":
            self._cancelled.append(run_id)
            return fleet.runs.cancel(run_id).outcome
        if verb == "send":
            return self._send(fleet)
        if verb == "resume":
            return fleet.runs.resume(self._paused.pop()).outcome if self._paused else ""
        return fleet.runs.retry(self._cancelled.pop()).outcome if self._cancelled else ""

    def _send(self, fleet: Fleet) -> str:
        """Ask a completed run something further; the plan of its conversation has an end."""
        older = self._run_ids[: max(len(self._run_ids) * 3 // 4, 1)]
        for run_id in self._draw.sample(older, min(len(older), MOST_LOOKS)):
            if (
                self._sent[run_id] < MOST_SENT
                and fleet.runs.result(run_id).lifecycle == "completed"
            ):
                self._sent[run_id] += 1
                return fleet.runs.send(run_id, f"and then? ({self._sent[run_id]})").outcome
        return ""
