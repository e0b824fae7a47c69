"""A step that has ended its workers is tried in a process of its own before it is given up.

When a worker dies, every run in its hands is suspect, and at most one of them is to blame. Whoever
dies alone is; the others commit, and are suspect no more. Decides who is tried so, and how many at
a time; knows nothing of what the step does.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol, cast

from stepfleet.orchestrator.agent import Agent
from stepfleet.orchestrator.events import Events
from stepfleet.orchestrator.loading_agents import load_agents
from stepfleet.orchestrator.protocol.claim import Claim, StepHint
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.settings import Settings, load_settings
from stepfleet.orchestrator.store.opening import client_app
from stepfleet.worker.leases import Leases
from stepfleet.worker.ports import Store
from stepfleet.worker.services import LoopServices
from stepfleet.worker.step import CANCELLED, run_step

log = logging.getLogger(__name__)

PLACES = 2
"""Processes of this kind that one worker starts at a time; each is a whole interpreter."""

FEWEST = 3
"""Below so many crashes a run is given up without a trial."""

AGENTS = "STEPFLEET_AGENTS"
_BEGAN = b"began\n"


class Trials:
    """Tries steps alone. `limit` crashes end a run; without a place a step waits `wait` seconds."""

    def __init__(self, limit: int, wait: float, command: Sequence[str] = ()) -> None:
        self._limit = limit
        self._wait = wait
        self._command = command or (sys.executable, "-m", "stepfleet.worker.alone")
        self._places = PLACES

    async def tried(self, claim: Claim, store: Store) -> bool:
        """Try the claimed step alone if it is its last chance; False where it is to be done here.

        Its process goes on under the same token. One that dies leaves the lease to run out, and
        with that the last crash is counted.
        """
        if self._limit < FEWEST or claim.crashes != self._limit - 1:
            return False
        if not self._places:
            await _release(claim, store, self._wait)
            return True
        self._places -= 1
        try:
            return await self._try(claim, store)
        finally:
            self._places += 1

    async def _try(self, claim: Claim, store: Store) -> bool:
        log.warning(
            "step %d of run %s has ended %d workers; it is tried in a process of its own",
            *(claim.number, claim.run_id, claim.crashes),
        )
        process, began = None, False
        try:
            process = await self._start(claim)
            began = await process.stdout.readline() == _BEGAN
            await process.wait()
        except asyncio.CancelledError:
            if process is None or not (await _stopped(process) or began):
                await _release(claim, store, 0.0)
            return True
        if not began:
            log.warning("no process of its own could be started for run %s", claim.run_id)
        return began

    async def _start(self, claim: Claim) -> "_Process":
        started = await asyncio.create_subprocess_exec(
            *self._command,
            *(claim.run_id, str(claim.step), claim.token),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        return cast("_Process", started)


class _Process(Protocol):
    """A process whose standard output is read."""

    @property
    def stdout(self) -> asyncio.StreamReader: ...

    def terminate(self) -> None: ...

    async def wait(self) -> int: ...


async def _stopped(process: _Process) -> bool:
    """Let the process hand its step back; tell whether it had begun."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    began = _BEGAN in await process.stdout.read()
    await process.wait()
    return began


async def _release(claim: Claim, store: Store, delay: float) -> None:
    verdict = Verdict(Move.RELEASE, claim.state, delay=delay)
    committed = await store.commit(claim, verdict, Events([]))
    if committed.wanted:
        state = claim.state.model_copy(update={"stop_requested": CANCELLED})
        await store.commit(claim, replace(verdict, state=state), Events([]))


async def do_alone(
    settings: Settings, agents: Iterable[Agent], hint: StepHint, token: str, began: int
) -> None:
    """Do one step that is claimed under `token`; say on the file `began` when it has begun."""
    app, leases = client_app(settings), Leases(time.monotonic)
    services = LoopServices(settings, agents, app, leases)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leases.hand_back)

    def visit(point: str) -> None:
        if point == "after-claim":
            os.write(began, _BEGAN)

    try:
        ports = replace(await services.ports(), token=lambda: token, crash=visit, alone=None)
        await run_step(hint, ports, leases)
    finally:
        await services.aclose()
        app.close()


def main(arguments: Sequence[str]) -> None:
    """Do the step that the arguments name: run, step, token."""
    run_id, step, token = arguments
    references = [one for one in os.environ.get(AGENTS, "").split(",") if one]
    agents = load_agents(references).values()
    # What a tool prints would fill a pipe that nobody empties.
    began = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    asyncio.run(do_alone(load_settings(), agents, StepHint(run_id, int(step)), token, began))


if __name__ == "__main__":
    main(sys.argv[1:])
