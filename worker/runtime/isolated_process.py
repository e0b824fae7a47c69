"""A process for suspects (`isolation`): does steps and tool calls that have ended their workers.

Takes each over under the token of the worker that started this process, and does it as that worker
would. Whoever started it may be gone by then: what it has, it finishes. Decides nothing.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.protocol.attempt import Interruption
from stepfleet.orchestrator.protocol.claim import StepHint
from stepfleet.orchestrator.protocol.waiting import ToolHint
from stepfleet.orchestrator.settings.settings import Settings, load_settings
from stepfleet.orchestrator.store.opening.opening import client_app
from stepfleet.orchestrator.store.runs.isolation_marks import TrialMarks
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.ports import Ports
from stepfleet.worker.runtime.isolation.processes import BEGAN, DONE, READY
from stepfleet.worker.runtime.services import LoopServices

AGENTS = "STEPFLEET_AGENTS"
STUCK_SECONDS = 60.0
"""An event loop that stands still for so long loses its leases, and nobody waits for its end."""
TICKS = 20

log = logging.getLogger(__name__)


class Suspects:
    """What this process does at a time; `say` writes a line to whoever started it."""

    def __init__(
        self, services: LoopServices, leases: Leases, ports: Ports, say: Callable[[str], None]
    ) -> None:
        self._services = services
        self._leases = leases
        self._ports = ports
        self._say = say
        opened = services.store
        self._marks = TrialMarks(opened.connection, opened.keys, opened.dispatch)
        self._tasks: set[asyncio.Task[None]] = set()

    def hear(self, order: dict[str, Any]) -> None:
        """Begin a piece of work, or break it off."""
        hint: StepHint | ToolHint = StepHint(order["run"], order["step"])
        if order["index"] is not None:
            hint = ToolHint(order["run"], order["step"], order["index"])
        if "interrupt" in order:
            self._interrupt(hint, Interruption(order["interrupt"]))
            return
        task = asyncio.create_task(self._do(hint, order["token"], order["group"]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait for what was begun."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _interrupt(self, hint: StepHint | ToolHint, by: Interruption) -> None:
        lease = (
            self._leases.calls.get(hint)
            if isinstance(hint, ToolHint)
            else self._leases.steps.get(hint.run_id)
        )
        if lease is not None:
            lease.interrupt(by)

    async def _do(self, hint: StepHint | ToolHint, token: str, group: int) -> None:
        try:
            if await self._marks.begin(hint, token, group):
                self._say(f"{BEGAN} {token}")
                # Its worker has seen to that it is no more than suspect.
                ports = replace(self._ports, token=lambda: token, poison_limit=sys.maxsize)
                if isinstance(hint, ToolHint):
                    await self._services.run_call(hint, ports)
                else:
                    await self._services.run_step(hint, ports)
        except Exception:
            log.exception("run %s, step %d could not be tried", hint.run_id, hint.step + 1)
        finally:
            self._say(f"{DONE} {token}")


async def serve(settings: Settings, agents: Iterable[Agent], say: Callable[[str], None]) -> None:
    """Do what standard input asks for, a line each, until it ends and everything is done."""
    app, leases = client_app(settings), Leases(time.monotonic)
    services = LoopServices(settings, agents, app, leases, consumes=False)
    services.be_patient(math.inf)
    orders = await _lines_of_input()

    def hand_back() -> None:
        services.be_patient(settings.patience)
        leases.hand_back()
        orders.feed_eof()

    watch = asyncio.create_task(end_if_stuck(STUCK_SECONDS))
    try:
        suspects = Suspects(services, leases, await services.ports(), say)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, hand_back)
        say(READY)
        while line := await orders.readline():
            suspects.hear(json.loads(line))
        await suspects.finish()
    finally:
        watch.cancel()
        await services.aclose()
        app.close()


async def _lines_of_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin.buffer)
    return reader


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


def main() -> None:
    """Serve whoever started this process: orders on standard input, news on standard output."""
    # What agents and tools print would be taken for news, or fill a pipe that nobody empties.
    news = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(line: str) -> None:
        with contextlib.suppress(OSError):  # who started this process may have died
            os.write(news, line.encode() + b"\n")

    references = [one for one in os.environ.get(AGENTS, "").split(",") if one]
    agents = load_agents(references).values()
    asyncio.run(serve(load_settings(), agents, say))


if __name__ == "__main__":
    main()
