"""Keepers that a measurement kills again and again: at random moments, and at named points."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from processes import HERE, ended

from stepfleet.worker.runtime.crash_points import VARIABLE

POINTS = ("rescue-saved", "limits-admitted")
"""There a keeper has changed Redis, and what it has to publish is in its memory alone."""
MOST_VISITS = 3
"""It ends at its first to third visit of a point."""
RANDOM = "a random moment"
HASTE = 0.2
"""The share of kills that do not wait until all keepers are at work."""
PROGRAM = ("-m", "stepfleet.orchestrator.cli", "keeper", "--port", "0")


@dataclass
class Keeper:
    """A keeper process; `point` is where it will end by SIGKILL, empty for nowhere."""

    process: "subprocess.Popen[str]"
    point: str
    began: float

    @property
    def name(self) -> str:
        """The name under which the fleet knows it."""
        return f"{socket.gethostname()}:{self.process.pid}"


@dataclass
class Keepers:
    """Keepers of one fleet, `most` of which are killed: one `every` seconds or so after a start.

    `deeds` says what the keeper of a name is doing, nothing before it has reported; `log` gets what
    all of them say. Whoever waits calls `look`, which kills and replaces. `kills` has a row per
    kill.
    """

    environment: Mapping[str, str]
    running: contextlib.ExitStack
    log: IO[str]
    draw: random.Random
    most: int
    every: float
    deeds: Callable[[str], str]
    alive: list[Keeper] = field(default_factory=list)
    kills: list[dict[str, Any]] = field(default_factory=list)
    phase: str = ""
    _next: float | None = float("inf")
    """When the next one is killed; None until all are at work, and a pause after that."""
    _pause: float = 0.0

    def start(self, point: str = "") -> None:
        """Start one more, ready or not; with a `point` it ends there by SIGKILL."""
        aimed = {VARIABLE: f"{point}:{self.draw.randint(1, MOST_VISITS)}"} if point else {}
        process = subprocess.Popen(
            [sys.executable, *PROGRAM],
            env={**os.environ, **self.environment, **aimed},
            cwd=HERE,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.running.enter_context(ended(process))
        self.alive.append(Keeper(process, point, time.monotonic()))

    def begin(self) -> None:
        """Let the kills begin."""
        self._next, self._pause = None, self.every * self.draw.random()

    def look(self) -> None:
        """Kill one where it is time, and replace those that are dead.

        Raises `RuntimeError` where one has ended by itself.
        """
        for one in list(self.alive):
            if (code := one.process.poll()) is None:
                continue
            if code != -signal.SIGKILL or not one.point:
                raise RuntimeError(f"a keeper ended by itself with {code}")
            self._replace(one, one.point)
        if len(self.kills) < self.most and self._is_time():
            self._plan()
            victim = self.draw.choice(self.alive)
            deed = self.deeds(victim.name)
            victim.process.kill()
            victim.process.wait()
            self._replace(victim, f"{RANDOM}, {deed or 'at its start'}")

    def _is_time(self) -> bool:
        if self._next is None and all(self.deeds(one.name) for one in self.alive):
            self._next = time.monotonic() + self._pause
        return self._next is not None and time.monotonic() >= self._next

    def _plan(self) -> None:
        self._pause = self.every * self.draw.uniform(0.1, 1.9)
        hastens = self.draw.random() < HASTE
        self._next = time.monotonic() + self._pause if hastens else None

    def _replace(self, dead: Keeper, place: str) -> None:
        """Note where it died; start another one, aimed at a point where no other one is."""
        self.alive.remove(dead)
        age = time.monotonic() - dead.began
        self.kills.append({"phase": self.phase, "place": place, "age": age})
        may_aim = len(self.kills) < self.most and not any(one.point for one in self.alive)
        self.start(self.draw.choice(POINTS) if may_aim else "")
