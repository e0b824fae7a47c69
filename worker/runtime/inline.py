"""Runs steps in the caller's own process, without Celery: the same step over the same store.

For notebooks, debugging and tests: results equal the fleet's, and a run may change hands between
this and real workers at any step.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import Self

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.protocol.claim import Refused, StepHint
from stepfleet.orchestrator.protocol.waiting import ToolHint, awaited
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.opening.opening import client_app
from stepfleet.orchestrator.store.runs.reading import Runs, StoredRun
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.runtime.services import LoopServices

WAITING = frozenset({Refused.EARLY, Refused.LEASED})
LONGEST_WAIT = 1.0


class InlineWorker:
    """Does the steps of given runs here: `async with InlineWorker(settings, agents) as worker`."""

    def __init__(self, settings: Settings, agents: Iterable[Agent]) -> None:
        self._app = client_app(settings)
        self._services = LoopServices(settings, agents, self._app, Leases(time.monotonic))

    async def __aenter__(self) -> Self:
        """Connect. Raises `StoreError` when Redis cannot be reached."""
        await self._services.ports()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect."""
        await self._services.aclose()
        self._app.close()

    async def finish(self, *run_ids: str) -> None:
        """Do steps of these runs, all at once, until each has ended or is paused."""
        await asyncio.gather(*(self._finish(run_id) for run_id in run_ids))
        await self._services.settle()

    async def _finish(self, run_id: str) -> None:
        while True:
            run = await self._open(run_id)
            if run is None:
                return
            step, waits = run.step, awaited(run.header.get("waiting", ""), str(run.step))
            if waits and await self._make_calls(run_id, step, waits):
                continue
            report = await self._services.run_step(StepHint(run_id, step))
            if report.refusal and report.refusal.why in WAITING:
                await asyncio.sleep(min(int(report.refusal.detail) / 1000, LONGEST_WAIT))

    async def _make_calls(self, run_id: str, step: int, indexes: Iterable[int]) -> bool:
        """Make the tool calls that a run waits for; return whether there was any."""
        hints = [ToolHint(run_id, step, index) for index in indexes]
        reports = await asyncio.gather(*(self._services.run_call(hint) for hint in hints))
        return any(report.refusal is None for report in reports)

    async def _open(self, run_id: str) -> StoredRun | None:
        store = self._services.store
        run = await Runs(store.connection, store.keys, store.configs).get(run_id)
        status = run.state.status
        return None if status.is_terminal or status == "paused" else run
