"""An isolated process: executes steps and tool calls that may have ended their workers.

Takes each over under the token of the worker that started this process, and executes it as that
worker would. It finishes its work also when that worker is gone. Decides nothing.
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
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.settings.settings import Settings, load_settings
from stepfleet.orchestrator.store.dispatch import client_app
from stepfleet.orchestrator.store.store import Store
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.runtime.isolation import BEGAN, DONE, READY
from stepfleet.worker.runtime.worker import Worker

AGENTS = "STEPFLEET_AGENTS"
STUCK_SECONDS = 60.0
"""An event loop that is blocked for so long loses its leases, and nobody waits for its end."""
TICKS = 20

log = logging.getLogger(__name__)


class Suspects:
    """The suspects in this process; `send` writes a line to the worker that started it."""

    def __init__(self, worker: Worker, leases: Leases, send: Callable[[str], None]) -> None:
        self._worker = worker
        self._leases = leases
        self._send = send

    def receive(self, request: dict[str, Any], tasks: asyncio.TaskGroup) -> None:
        """Begin a piece of work, or interrupt it."""
        hint = Work(request["run"], request["step"], request["index"])
        if "interrupt" not in request:
            tasks.create_task(self._execute(hint, request["token"], request["group"]))
        elif lease := self._leases.held.get(hint):
            lease.interrupt(Interruption(request["interrupt"]))

    async def _execute(self, hint: Work, token: str, group: int) -> None:
        try:
            if await self._worker.store.marks.begin(hint, token, group):
                self._send(f"{BEGAN} {token}")
                # Its worker has checked that it is no more than suspect.
                ports = replace(self._worker.ports, token=lambda: token, poison_limit=sys.maxsize)
                await self._worker.run(hint, ports)
        except Exception:
            log.exception("run %s, step %d could not be executed", hint.run_id, hint.step + 1)
        finally:
            self._send(f"{DONE} {token}")


async def serve(settings: Settings, agents: Iterable[Agent], send: Callable[[str], None]) -> None:
    """Execute the requests of standard input, a line each, until it ends and all is done."""
    app, leases = client_app(settings), Leases(time.monotonic)
    requests = await _lines_of_input()

    def wait(store: Store) -> None:
        store.connection.patience = math.inf

    watch = asyncio.create_task(end_if_stuck(STUCK_SECONDS))
    opening = Worker.open(settings, agents, app, leases, consumes=False, connected=wait)
    try:
        async with opening as worker:

            def hand_back() -> None:
                worker.store.connection.patience = settings.patience
                leases.hand_back()
                requests.feed_eof()

            suspects = Suspects(worker, leases, send)
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, hand_back)
            send(READY)
            try:
                async with asyncio.TaskGroup() as tasks:
                    while line := await requests.readline():
                        suspects.receive(json.loads(line), tasks)
            finally:
                watch.cancel()  # its clock stands still: a close without end is ended
    finally:
        watch.cancel()
        app.close()


async def _lines_of_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin.buffer)
    return reader


async def end_if_stuck(seconds: float) -> None:
    """End this process when its event loop has been blocked for so long.

    A worker whose loop is blocked loses its leases; here its worker would wait without an end.
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
    """Serve the worker that started this process, by standard input and output."""
    # Output of agents and tools would be taken for messages, or fill a pipe that nobody empties.
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(line: str) -> None:
        with contextlib.suppress(OSError):  # the worker may have died
            os.write(output, line.encode() + b"\n")

    references = [one for one in os.environ.get(AGENTS, "").split(",") if one]
    agents = load_agents(references).values()
    asyncio.run(serve(load_settings(), agents, send))


if __name__ == "__main__":
    main()
