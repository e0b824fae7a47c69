"""Work that has ended its workers is tried in a process of its own before it is given up.

When a worker dies, everything in its hands is suspect, and at most one thing of it is to blame.
Whoever dies alone is; the others are done, and are suspect no more. Decides who is tried so, and
how many at a time; knows nothing of what a step or a tool call does.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.events import Events
from stepfleet.orchestrator.protocol.claim import Claim, StepHint
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.protocol.waiting import ToolHint
from stepfleet.worker.call_leases import CallLease
from stepfleet.worker.leases import Holding, Lease, Term
from stepfleet.worker.ports import CallStore, Store
from stepfleet.worker.step import CANCELLED

log = logging.getLogger(__name__)

PLACES = 2
"""Processes of this kind that one worker starts at a time; each is a whole interpreter."""

FEWEST = 3
"""Below so many crashes a run is given up without a trial."""

SPARED = 5
"""So many workers may die on the way to a trial, beyond the limit, without that it has begun."""

STOP_SECONDS = 30.0
BEGAN = b"began\n"
"""What a process of its own says when the work is its own."""

Release = Callable[[float], Awaitable[None]]


class Renewed(Protocol):
    """Answer to a renewal."""

    @property
    def ours(self) -> bool:
        """Whether the lease still belongs to this worker."""


class Renewing(Protocol):
    """Renews leases for as long as their term says."""

    async def step(self, lease: Lease) -> Renewed:
        """Renew a step's lease."""

    async def call(self, lease: CallLease) -> Renewed:
        """Renew a tool call's lease."""


class Marks(Protocol):
    """Tells what has ended a process of its own."""

    async def has_died(self, hint: StepHint | ToolHint) -> bool:
        """Return whether the last process of its own that began with it has died of it."""


class Trials:
    """Tries work alone. `limit` crashes end it; without a place it waits `wait` seconds.

    A worker that dies between taking suspect work and its trial is counted against that work,
    too. So what has not died alone, as `marks` tell, is tried again.
    """

    def __init__(
        self,
        limit: int,
        wait: float,
        renewing: Renewing,
        marks: Marks,
        command: Sequence[str] = (),
    ) -> None:
        self._limit = limit
        self._wait = wait
        self._renewing = renewing
        self._marks = marks
        self._command = command or (sys.executable, "-m", "stepfleet.worker.alone")
        self._places = PLACES

    async def tried(self, lease: Lease, store: Store) -> bool:
        """Try the claimed step alone if it is its last chance; False where it is to be done here.

        Its process goes on under the same token. When one has died the lease is over, and with
        that the last crash is counted. Raises `StoreError` when Redis stays out of reach.
        """
        claim = lease.claim
        hint = StepHint(claim.run_id, claim.step)
        if not await self._is_last_chance(hint, claim.crashes):
            return False
        what = f"step {claim.number} of run {claim.run_id}"
        return await self._tried(
            lease,
            partial(self._renewing.step, lease),
            partial(_release_step, claim, store),
            (what, claim.crashes),
            (claim.run_id, str(claim.step), claim.token),
        )

    async def tried_call(self, lease: CallLease, calls: CallStore) -> bool:
        """Try the tool call alone if it is its last chance; as `tried` does with steps."""
        taken, hint = lease.taken, lease.taken.hint
        if not await self._is_last_chance(hint, taken.crashes):
            return False
        what = f"tool {taken.call.name} in step {hint.step + 1} of run {hint.run_id}"
        return await self._tried(
            lease,
            partial(self._renewing.call, lease),
            partial(_release_call, lease, calls),
            (what, taken.crashes),
            (hint.run_id, str(hint.step), taken.token, str(hint.index)),
        )

    async def _is_last_chance(self, hint: StepHint | ToolHint, crashes: int) -> bool:
        if self._limit < FEWEST or not self._limit - 1 <= crashes < self._limit + SPARED:
            return False
        return crashes < self._limit or not await self._marks.has_died(hint)

    async def _tried(
        self,
        lease: Holding,
        renew: Callable[[], Awaitable[Renewed]],
        release: Release,
        told: tuple[str, int],
        arguments: Sequence[str],
    ) -> bool:
        if not self._places:
            await release(self._wait)
            return True
        log.warning("%s has ended %d workers; it is tried in a process of its own", *told)
        self._places -= 1
        lease.term = Term.LONG
        try:
            return await self._try(lease, renew, release, arguments)
        finally:
            lease.term = Term.ORDINARY
            self._places += 1

    async def _try(
        self,
        lease: Holding,
        renew: Callable[[], Awaitable[Renewed]],
        release: Release,
        arguments: Sequence[str],
    ) -> bool:
        process, began = None, False
        try:
            if not (await renew()).ours:
                return True
            try:
                process = await self._start(arguments)
            except OSError as error:  # no memory, too many files: a moment later there may be
                log.warning("a process of its own cannot be started now: %s", error)
                await release(self._wait)
                return True
            began = await process.stdout.readline() == BEGAN
            await process.wait()
        except asyncio.CancelledError:
            if process is None or not (await _stopped(process) or began):
                await release(0.0)
            return True
        if not began:
            log.warning("no process of its own has begun the work of run %s", arguments[0])
            return not (await renew()).ours
        lease.term = Term.OVER
        with contextlib.suppress(StoreError):  # then the lease has to run out
            await renew()
        return True

    async def _start(self, arguments: Sequence[str]) -> "_Process":
        started = await asyncio.create_subprocess_exec(
            *self._command,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        return cast("_Process", started)


class _Process(Protocol):
    """A process whose standard output is read."""

    @property
    def stdout(self) -> asyncio.StreamReader: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    async def wait(self) -> Any: ...


async def _stopped(process: _Process) -> bool:
    """Let the process hand its work back; tell whether it had begun."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            began = BEGAN in await process.stdout.read()
            await process.wait()
    except TimeoutError:  # whatever it has begun is left to the lease
        began = True
        process.kill()
        await process.wait()
    return began


async def _release_step(claim: Claim, store: Store, delay: float) -> None:
    verdict = Verdict(Move.RELEASE, claim.state, delay=delay)
    committed = await store.commit(claim, verdict, Events([]))
    if committed.wanted:
        state = claim.state.model_copy(update={"stop_requested": CANCELLED})
        await store.commit(claim, replace(verdict, state=state), Events([]))


async def _release_call(lease: CallLease, calls: CallStore, delay: float) -> None:
    await calls.leave(lease.taken.hint, lease.taken.token, delay=delay, started=False)
