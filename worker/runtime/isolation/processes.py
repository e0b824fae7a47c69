"""Processes for suspects: who shares one, and what becomes of them when it dies.

A process takes one group after the other, and does their steps as a worker would, on one event
loop. Decides when a process is started, and what its death says; knows nothing of Redis, nor of
what makes work suspect.
"""

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, cast

from stepfleet.orchestrator.protocol.attempt import Interruption
from stepfleet.orchestrator.protocol.claim import StepHint
from stepfleet.orchestrator.protocol.suspicion import Suspect, next_group
from stepfleet.orchestrator.protocol.waiting import ToolHint

log = logging.getLogger(__name__)

_PROGRAM = "stepfleet.worker.runtime.isolated_process"
PLACES = 4
"""Processes that one worker starts at a time; each is a whole interpreter."""
MOST_PLACES = 16
PATIENCE_SECONDS = 10.0
"""Whoever has waited so long for a place gets one more, up to `MOST_PLACES`."""
GATHER_SECONDS = 0.2
"""Suspects come together: so long a process waits for those that might share it."""
IDLE_SECONDS = 10.0
START_SECONDS = 60.0
STOP_SECONDS = 30.0
CLOSE_SECONDS = 2.0
"""So long whoever was not begun is waited for before it is handed back."""
END_SECONDS = 4.0
SURE_SECONDS = 1.0
"""What ends a process and its worker together (a container, a host) ends the worker by then."""
MOST_TRIES = 3
ASKED_TO_END = frozenset({-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
READY, BEGAN, DONE = "ready", "began", "done"
"""What a process for suspects says: a word, and the token of the work that it is about."""


class Outcome(StrEnum):
    """What became of a suspect."""

    DONE = "done"
    DIED = "died"
    NOT_STARTED = "not_started"
    NO_ROOM = "no_room"


@dataclass(eq=False)
class Member:
    """A suspect on its way through a process. `ended` has its outcome."""

    hint: StepHint | ToolHint
    token: str
    suspect: Suspect
    died: Callable[[int], Awaitable[None]]
    """Is awaited with the size of its group when its process has died with it."""
    begun: bool = False
    tries: int = 0
    place: "_Place | None" = None
    waits_since: float = 0.0
    ended: asyncio.Future[Outcome] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def end(self, outcome: Outcome) -> None:
        """Tell what became of it; the first word counts."""
        if not self.ended.done():
            self.ended.set_result(outcome)


class IsolatedProcesses:
    """The processes for suspects of one event loop.

    `command` starts one; `places` of them work at a time; `sure` is how many seconds a death is
    looked at before it counts; `draining` tells whether the worker stops.
    """

    def __init__(
        self,
        command: Sequence[str] = (),
        places: int = PLACES,
        sure: float = SURE_SECONDS,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self.places = places
        self.sure = sure
        self._draining = draining
        self._has_ended = False
        self._command = command or (sys.executable, "-m", _PROGRAM)
        self._waiting: list[Member] = []
        self._busy: set[asyncio.Task[None]] = set()
        self._open: set[_Place] = set()
        self._ending: set[asyncio.Task[int]] = set()
        self._news = asyncio.Event()

    @property
    def stopping(self) -> bool:
        """Whether the worker stops: then nothing is begun, and no death counts."""
        return self._has_ended or self._draining()

    async def join(self, member: Member) -> Outcome:
        """Have a suspect tried; return what became of it.

        Whoever is cancelled meanwhile says so by `leave`.
        """
        self._queue(member)
        return await asyncio.shield(member.ended)

    async def leave(self, member: Member, by: Interruption) -> bool:
        """Break a suspect's attempt off; return whether a process had begun it.

        Waits until that process has written what there is, for a while.
        """
        if member in self._waiting:
            self._waiting.remove(member)
        if member.place is None:
            return False
        member.place.say({**_order(member, 0), "interrupt": str(by)})
        seconds = STOP_SECONDS if member.begun else CLOSE_SECONDS
        await asyncio.wait([member.ended], timeout=seconds)
        return member.begun

    async def aclose(self) -> None:
        """Ask all processes to hand back and end; they do so also when nobody waits for it."""
        self._has_ended = True
        for place in self._open:
            place.terminate()
        tasks = list(self._busy)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._ending:
            await asyncio.wait(self._ending, timeout=END_SECONDS)

    def next(self) -> list[Member]:
        """Take the next group out of those that wait."""
        if not self._waiting:
            return []
        chosen = next_group([one.suspect for one in self._waiting], self.places)
        group = [self._waiting[index] for index in chosen]
        self._waiting = [one for one in self._waiting if one not in group]
        return group

    async def something_waits(self) -> bool:
        """Wait until there may be a next group; False after `IDLE_SECONDS` without."""
        if not self._waiting:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_SECONDS):
                    await self._news.wait()
        return bool(self._waiting)

    async def start(self) -> "Process":
        """Start a process. Raises `OSError`."""
        started = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the worker, which passes it on
        )
        return cast("Process", started)

    def see_off(self, process: "Process") -> None:
        """Let a process end by itself: nobody has more for it."""
        with contextlib.suppress(OSError, RuntimeError):
            process.stdin.close()
        ending = asyncio.create_task(process.wait())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def again(self, member: Member) -> None:
        """Let a suspect wait once more whose process died before it had begun."""
        member.tries += 1
        member.place = None
        if member.tries >= MOST_TRIES or self.stopping:
            member.end(Outcome.NOT_STARTED)
        else:
            self._queue(member)

    def _queue(self, member: Member) -> None:
        loop = asyncio.get_running_loop()
        member.waits_since = loop.time()
        self._waiting.append(member)
        self._news.set()
        self._open_place()
        loop.call_later(PATIENCE_SECONDS, self._open_place)

    def _open_place(self) -> None:
        if not self._waiting or self.stopping:
            return
        waited = asyncio.get_running_loop().time() - self._waiting[0].waits_since
        most = MOST_PLACES if waited >= PATIENCE_SECONDS else self.places
        idle = sum(place.is_idle for place in self._open)
        if len(self._open) < most and (idle == 0 or self._waiting[0].suspect.by_tools):
            place = _Place(self)
            self._open.add(place)
            task = asyncio.create_task(place.run(), name="stepfleet-suspects")
            self._busy.add(task)
            task.add_done_callback(lambda done: self._closed(place, done))

    def _closed(self, place: "_Place", task: asyncio.Task[None]) -> None:
        self._open.discard(place)
        self._busy.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a process for suspects could not be looked after: %r", error)
        for member in place.members.values():
            member.end(Outcome.NOT_STARTED)
        self._open_place()


class Process(Protocol):
    """A process whose standard input and output are ours."""

    @property
    def stdin(self) -> asyncio.StreamWriter:
        """Where it reads orders."""

    @property
    def stdout(self) -> asyncio.StreamReader:
        """Where it says what it does."""

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal, once it has ended."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it."""

    async def wait(self) -> int:
        """Wait for its end; return its exit code."""


class _Place:
    """Room for one process at a time, and for the group that it has."""

    def __init__(self, isolation: IsolatedProcesses) -> None:
        self.is_idle = True
        self.members: dict[str, Member] = {}
        self._isolation = isolation
        self._process: Process | None = None
        self._is_fresh = True

    async def run(self) -> None:
        """Take one group after the other until none comes for a while."""
        await asyncio.sleep(GATHER_SECONDS)
        try:
            while await self._isolation.something_waits():
                group = self._isolation.next()
                self.is_idle = False
                await self._try(group)
                self.is_idle = True
        finally:
            self._end()

    def say(self, order: dict[str, Any]) -> None:
        """Write a line to the process, if there is one."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(OSError, RuntimeError):
                self._process.stdin.write(json.dumps(order).encode() + b"\n")

    def terminate(self) -> None:
        """Ask the process to hand back and end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    async def _try(self, group: list[Member]) -> None:
        self.members = {one.token: one for one in group if not one.ended.done()}
        # Whoever is alone must be so: what an earlier one has left behind might end the process.
        if len(group) == 1 and not self._is_fresh:
            self._end()
        try:
            process = await self._started()
        except OSError as error:  # no memory, too many files: a moment later there may be
            log.warning("a process for suspects cannot be started now: %s", error)
            return self._end_all(Outcome.NO_ROOM)
        if process is None:
            return self._end_all(Outcome.NOT_STARTED)
        self._is_fresh = False
        log.warning(
            "%d that lost their workers again and again are tried in a process of their own: "
            "run %s, step %d%s",
            *(len(group), group[0].hint.run_id, group[0].hint.step + 1),
            " and others" if len(group) > 1 else "",
        )
        for one in group:
            one.place = self
            self.say(_order(one, len(group)))
        while self.members:
            line = await process.stdout.readline()
            if not line:
                return await self._died(process, len(group))
            self._hear(line.decode(errors="replace"))
        return None

    def _hear(self, line: str) -> None:
        word, _, token = line.strip().partition(" ")
        if word == BEGAN and token in self.members:
            self.members[token].begun = True
        elif word == DONE and token in self.members:
            self.members.pop(token).end(Outcome.DONE)

    async def _died(self, process: Process, group: int) -> None:
        code = await process.wait()
        self._process = None
        begun = [one for one in self.members.values() if one.begun]
        others = [one for one in self.members.values() if not one.begun]
        self.members = {}
        for one in others:
            self._isolation.again(one)
        if not begun:
            return
        await asyncio.sleep(self._isolation.sure)
        if self._isolation.stopping or code in ASKED_TO_END:
            for one in begun:  # it was to hand back; where it has not, its leases run out
                one.end(Outcome.DONE)
            return
        log.warning("a process has died (%s) with %d of %d suspects", code, len(begun), group)
        await asyncio.gather(*(one.died(group) for one in begun), return_exceptions=True)
        for one in begun:
            one.end(Outcome.DIED)

    async def _started(self) -> Process | None:
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._process, self._is_fresh = await self._isolation.start(), True
        try:
            async with asyncio.timeout(START_SECONDS):
                said = await self._process.stdout.readline()
        except TimeoutError:
            said = b""
            self._process.kill()
        if said.decode(errors="replace").strip() == READY:
            return self._process
        log.warning("a process for suspects has ended before it was ready; its log says why")
        await self._process.wait()
        self._process = None
        return None

    def _end_all(self, outcome: Outcome) -> None:
        for one in self.members.values():
            one.end(outcome)
        self.members = {}

    def _end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._isolation.see_off(self._process)
        self._process = None


def _order(member: Member, group: int) -> dict[str, Any]:
    hint = member.hint
    index = hint.index if isinstance(hint, ToolHint) else None
    known = {"run": hint.run_id, "step": hint.step, "index": index}
    return {**known, "token": member.token, "group": group}
