"""Suspects, which may have ended their workers, are executed in isolated processes.

Decides which work is isolated, what is delayed first, which suspects share a process, and what
follows when it dies; `Losses.suspicion` decides what losses mean. A process takes one group of
suspects after the other, and executes their steps as a worker would, on one event loop.
"""

import asyncio
import contextlib
import json
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stepfleet.orchestrator.protocol.attempt import Interruption
from stepfleet.orchestrator.protocol.claim import Stance, Suspicion, next_group
from stepfleet.orchestrator.store.runs.steps import IsolationMarks
from stepfleet.worker.leases.lease import Lease, Renew
from stepfleet.worker.ports import Ports
from stepfleet.worker.step import release

log = logging.getLogger(__name__)

_PROGRAM = "stepfleet.worker.runtime.isolated_process"
PROCESSES = 4
"""Processes that one worker runs at a time; each is a whole interpreter."""
MOST_PROCESSES = 16
PATIENCE_SECONDS = 10.0
"""A suspect that has waited so long gets one more process, up to `MOST_PROCESSES`."""
GATHER_SECONDS = 0.2
"""Suspects come together: a process waits so long for those that might share it."""
IDLE_SECONDS = 10.0
START_SECONDS = 60.0
STOP_SECONDS = 30.0
CLOSE_SECONDS = 2.0
"""So long a suspect that was not begun is waited for before it is handed back."""
END_SECONDS = 4.0
CONFIRM_SECONDS = 1.0
"""What ends a process and its worker together (a container, a host) ends the worker by then."""
MOST_STARTS = 3
ENDED_BY_REQUEST = frozenset({-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
READY, BEGAN, DONE = "ready", "began", "done"
"""Messages of an isolated process: a word, and the token of the work that it is about."""


class Outcome(StrEnum):
    """What became of a suspect; done is also one whose death is counted."""

    DONE = "done"
    NOT_STARTED = "not_started"
    NO_ROOM = "no_room"


@dataclass(eq=False)
class SuspectJob:
    """A suspect on its way through an isolated process."""

    lease: Lease
    suspicion: Suspicion
    begun: bool = False
    starts: int = 0
    slot: "_Slot | None" = None
    queued_at: float = 0.0
    outcome: asyncio.Future[Outcome] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def end(self, outcome: Outcome) -> None:
        """Set the outcome; the first one counts."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def request(self, **more: Any) -> dict[str, Any]:
        """Return what its process receives."""
        hint, token = self.lease.work.hint, self.lease.work.token
        return {"run": hint.run_id, "step": hint.step, "index": hint.index, "token": token, **more}


@dataclass(eq=False)
class Isolation:
    """Has suspects executed by `processes` (None: there are none).

    `limit` workers may be lost with work before it is suspect; `grace` is in seconds. Suspects
    wait here for their turn, under leases that are renewed, and not in a queue.
    """

    limit: int
    grace: float
    renew: Renew
    processes: "IsolatedProcesses | None"

    async def takes(self, lease: Lease, ports: Ports) -> bool:
        """Execute the work elsewhere, or delay it; False where it is to be done here.

        The isolated process goes on under the same token. Raises `StoreError` when Redis stays
        out of reach.
        """
        work = lease.work
        if delay := work.losses.delay(self.limit, self.grace):
            await release(work, ports, delay)
            return True
        found = work.losses.suspicion(self.limit)
        if self.processes is None or found.stance is not Stance.SUSPECT:
            return False
        job = SuspectJob(lease, found)
        try:
            outcome = await self.processes.join(job)
        except asyncio.CancelledError as cancelled:
            by = lease.interrupted_by(cancelled)
            lease.settle()
            begun = await self.processes.leave(job, by)
            if not begun and by is not Interruption.LEASE_LOST:
                await release(work, ports, self.grace if by.from_outside else 0.0)
            return True
        if outcome is Outcome.NO_ROOM:
            await release(work, ports, self.grace)
        if outcome is Outcome.NOT_STARTED:
            return not (await self.renew(lease)).ours
        return True

    async def aclose(self) -> None:
        """End all isolated processes, which hand back their work."""
        if self.processes:
            await self.processes.aclose()


class IsolatedProcesses:
    """The isolated processes of one event loop.

    `marks` counts their deaths, each after `confirm` seconds; `command` starts one; `limit` of them
    run at a time; `draining` tells whether the worker stops.
    """

    def __init__(
        self,
        marks: IsolationMarks,
        command: Sequence[str] = (),
        limit: int = PROCESSES,
        confirm: float = CONFIRM_SECONDS,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self.marks = marks
        self.command = command or (sys.executable, "-m", _PROGRAM)
        self.confirm = confirm
        self._limit = limit
        self._draining = draining
        self._has_ended = False
        self._waiting: list[SuspectJob] = []
        self._slots: dict[_Slot, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[int]] = set()
        self._queued = asyncio.Event()

    @property
    def stopping(self) -> bool:
        """Whether the worker stops: then nothing is begun, and no death counts."""
        return self._has_ended or self._draining()

    async def join(self, job: SuspectJob) -> Outcome:
        """Have a suspect executed; return what became of it. A cancelled caller calls `leave`."""
        self._queue(job)
        return await asyncio.shield(job.outcome)

    async def leave(self, job: SuspectJob, by: Interruption) -> bool:
        """Interrupt a suspect's attempt; return whether a process had begun it.

        Waits for a while until that process has written what there is.
        """
        if job in self._waiting:
            self._waiting.remove(job)
        if job.slot is None:
            return False
        job.slot.send(job.request(interrupt=str(by)))
        await asyncio.wait([job.outcome], timeout=STOP_SECONDS if job.begun else CLOSE_SECONDS)
        return job.begun

    async def aclose(self) -> None:
        """Request all processes to hand back and end; they do so without being waited for, too."""
        self._has_ended = True
        tasks = list(self._slots.values())
        for slot, task in self._slots.items():
            slot.terminate()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._ending:
            await asyncio.wait(self._ending, timeout=END_SECONDS)

    async def next_group(self) -> list[SuspectJob]:
        """Take the next group of the queue; an empty one after `IDLE_SECONDS` without."""
        if not self._waiting:
            self._queued.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_SECONDS):
                    await self._queued.wait()
        if not self._waiting:
            return []
        chosen = next_group([job.suspicion for job in self._waiting], self._limit)
        group = [self._waiting[index] for index in chosen]
        self._waiting = [job for job in self._waiting if job not in group]
        return group

    def dismiss(self, process: Process) -> None:
        """Let a process end by itself."""
        with contextlib.suppress(OSError, RuntimeError):
            _input_of(process).close()
        ending = asyncio.create_task(process.wait())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def retry(self, job: SuspectJob) -> None:
        """Queue a suspect once more whose process died before it had begun."""
        job.starts += 1
        job.slot = None
        if job.starts >= MOST_STARTS or self.stopping:
            job.end(Outcome.NOT_STARTED)
        else:
            self._queue(job)

    def _queue(self, job: SuspectJob) -> None:
        loop = asyncio.get_running_loop()
        job.queued_at = loop.time()
        self._waiting.append(job)
        self._queued.set()
        self._open_slot()
        loop.call_later(PATIENCE_SECONDS, self._open_slot)

    def _open_slot(self) -> None:
        if not self._waiting or self.stopping:
            return
        first = self._waiting[0]
        waited = asyncio.get_running_loop().time() - first.queued_at
        most = MOST_PROCESSES if waited >= PATIENCE_SECONDS else self._limit
        is_idle = any(slot.is_idle for slot in self._slots)
        if len(self._slots) < most and (first.suspicion.by_tools or not is_idle):
            slot = _Slot(self)
            task = asyncio.create_task(slot.run(), name="stepfleet-isolation")
            self._slots[slot] = task
            task.add_done_callback(lambda done: self._closed(slot, done))

    def _closed(self, slot: "_Slot", task: asyncio.Task[None]) -> None:
        del self._slots[slot]
        if not task.cancelled() and (error := task.exception()):
            log.error("an isolated process could not be looked after: %r", error)
        slot.end_all(Outcome.NOT_STARTED)
        self._open_slot()


class _Slot:
    """Runs one process at a time, and has its group of suspects, by token."""

    def __init__(self, processes: IsolatedProcesses) -> None:
        self.is_idle = True
        self._jobs: dict[str, SuspectJob] = {}
        self._processes = processes
        self._process: Process | None = None

    async def run(self) -> None:
        """Take one group after the other until none comes for a while."""
        await asyncio.sleep(GATHER_SECONDS)
        try:
            while group := await self._processes.next_group():
                self.is_idle = False
                await self._execute(group)
                self.is_idle = True
        finally:
            self._dismiss()

    def send(self, request: dict[str, Any]) -> None:
        """Send a request to the process, if there is one."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(OSError, RuntimeError):
                _input_of(self._process).write(json.dumps(request).encode() + b"\n")

    def terminate(self) -> None:
        """Request the process to hand back and end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def end_all(self, outcome: Outcome) -> None:
        """End what the slot has."""
        for job in self._jobs.values():
            job.end(outcome)
        self._jobs = {}

    async def _execute(self, group: list[SuspectJob]) -> None:
        self._jobs = {job.lease.work.token: job for job in group}
        # A suspect that is alone must be so: an earlier one's traces might end the process.
        if len(group) == 1:
            self._dismiss()
        process = await self._started()
        if isinstance(process, Outcome):
            return self.end_all(process)
        first = group[0].lease.work.hint
        log.warning(
            "%d that lost their workers repeatedly are executed in an isolated process: "
            "run %s, step %d%s",
            *(len(group), first.run_id, first.step + 1),
            " and others" if len(group) > 1 else "",
        )
        for job in group:
            job.slot = self
            self.send(job.request(group=len(group)))
        while self._jobs:
            line = await _line_of(process)
            if not line:
                return await self._died(process, len(group))
            self._receive(line)
        return None

    def _receive(self, line: str) -> None:
        word, _, token = line.partition(" ")
        if word == BEGAN and token in self._jobs:
            self._jobs[token].begun = True
        elif word == DONE and token in self._jobs:
            self._jobs.pop(token).end(Outcome.DONE)

    async def _died(self, process: Process, group: int) -> None:
        code = await process.wait()
        self._process = None
        jobs, self._jobs = list(self._jobs.values()), {}
        begun = [job for job in jobs if job.begun]
        for job in jobs:
            if not job.begun:
                self._processes.retry(job)
        if not begun:
            return
        await asyncio.sleep(self._processes.confirm)
        # A process that was to end has handed back; where it has not, its leases run out.
        if not self._processes.stopping and code not in ENDED_BY_REQUEST:
            many = len(begun)
            log.warning("an isolated process died (%s) with %d of %d suspects", code, many, group)
            counts = (self._count(job, group) for job in begun)
            await asyncio.gather(*counts, return_exceptions=True)
        for job in begun:
            job.end(Outcome.DONE)

    async def _count(self, job: SuspectJob, group: int) -> None:
        job.lease.settle()  # what is dispatched again may come to this worker
        work = job.lease.work
        await self._processes.marks.died(work.hint, work.token, group, work.config.name)

    async def _started(self) -> Process | Outcome:
        """Return the process, ready, or what becomes of its suspects without one."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        try:
            # In a session of its own: a terminal's Ctrl-C is for the worker, which passes it on.
            process = self._process = await asyncio.create_subprocess_exec(
                *self._processes.command, stdin=PIPE, stdout=PIPE, start_new_session=True
            )
        except OSError as error:  # no memory, too many files: a moment later there may be
            log.warning("an isolated process cannot be started now: %s", error)
            return Outcome.NO_ROOM
        try:
            async with asyncio.timeout(START_SECONDS):
                if await _line_of(process) == READY:
                    return process
        except TimeoutError:
            process.kill()
        log.warning("an isolated process has ended before it was ready; its log says why")
        await process.wait()
        self._process = None
        return Outcome.NOT_STARTED

    def _dismiss(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._processes.dismiss(self._process)
        self._process = None


def _input_of(process: Process) -> asyncio.StreamWriter:
    assert process.stdin is not None  # noqa: S101 - it was started with pipes
    return process.stdin


async def _line_of(process: Process) -> str:
    """Return the next message of a process; '' when it has ended."""
    assert process.stdout is not None  # noqa: S101 - it was started with pipes
    return (await process.stdout.readline()).decode(errors="replace").strip()
