"""A process of its own for one step or tool call that has ended its workers (`trials`).

Takes over under the token of the worker that started it, says so, and does the work as that
worker would; whoever started it may be gone by then. Decides nothing.
"""

import asyncio
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stepfleet.orchestrator.agent import Agent
from stepfleet.orchestrator.loading_agents import load_agents
from stepfleet.orchestrator.protocol.claim import StepHint
from stepfleet.orchestrator.protocol.waiting import ToolHint
from stepfleet.orchestrator.settings import Settings, load_settings
from stepfleet.orchestrator.store.opening import client_app
from stepfleet.orchestrator.store.trial_marks import TrialMarks
from stepfleet.worker.leases import Leases
from stepfleet.worker.renewals import TRIAL_SECONDS
from stepfleet.worker.services import LoopServices
from stepfleet.worker.step import run_step
from stepfleet.worker.trials import BEGAN

AGENTS = "STEPFLEET_AGENTS"
BEGINNINGS = ("after-claim", "call-taken")
TICKS = 20


class TrialServices(LoopServices):
    """Those of a process of its own: it has one piece of work, and that its last chance."""

    least_lease = TRIAL_SECONDS
    consumes = False


async def do_alone(
    settings: Settings, agents: Iterable[Agent], hint: StepHint | ToolHint, token: str, began: int
) -> None:
    """Do what is held under `token`; say on the file `began` when it has begun."""
    app, leases = client_app(settings), Leases(time.monotonic)
    services = TrialServices(settings, agents, app, leases, patience=math.inf)

    def hand_back() -> None:
        services.be_patient(settings.patience)
        leases.hand_back()
        services.hand_calls_back()

    def visit(point: str) -> None:
        if point in BEGINNINGS:
            with contextlib.suppress(OSError):  # who started this process may have died
                os.write(began, BEGAN)

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, hand_back)
    watch = asyncio.create_task(end_if_stuck(TRIAL_SECONDS))
    try:
        ports = replace(
            await services.ports(), token=lambda: token, crash=visit, poison_limit=sys.maxsize
        )
        marks = TrialMarks(services.store.connection, services.store.keys)
        await marks.begin(hint, token)
        if isinstance(hint, ToolHint):
            await services.run_call(hint, ports)
        else:
            await run_step(hint, ports, leases)
    finally:
        watch.cancel()
        await services.aclose()
        app.close()


async def end_if_stuck(seconds: float) -> None:
    """End this process when its event loop has stood still for so long.

    A worker whose loop stands still loses its leases; nobody takes this work from who waits for it.
    """
    ticked = time.monotonic()

    def watch() -> None:
        while time.monotonic() < ticked + seconds:
            time.sleep(seconds / TICKS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="stepfleet-stuck", daemon=True).start()
    while True:
        await asyncio.sleep(seconds / TICKS)
        ticked = time.monotonic()


def main(arguments: Sequence[str]) -> None:
    """Do the work that the arguments name: run, step, token and, of a tool call, its index."""
    run_id, step, token, *index = arguments
    hint: StepHint | ToolHint = StepHint(run_id, int(step))
    if index:
        hint = ToolHint(run_id, int(step), int(index[0]))
    # What agents and tools print would be taken for that word, or fill a pipe that nobody empties.
    began = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    references = [one for one in os.environ.get(AGENTS, "").split(",") if one]
    agents = load_agents(references).values()
    asyncio.run(do_alone(load_settings(), agents, hint, token, began))


if __name__ == "__main__":
    main(sys.argv[1:])
