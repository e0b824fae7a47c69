"""Retry of a batch's runs, page by page: shared configurations are built once, calls are pipelined.

A retried run is active, so a repeated request goes on where an interrupted one ended.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.agents.overrides import read_overrides, with_stored_overrides
from stepfleet.orchestrator.batches.selection import Selection
from stepfleet.orchestrator.client.control.control import RunControl, ensure_known, ensure_retryable
from stepfleet.orchestrator.client.control.resumable import Changes, changes_of
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.protocol.revision import Revision, revise
from stepfleet.orchestrator.records.batch import Manifest
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.lua import load
from stepfleet.orchestrator.store.pace import Pace
from stepfleet.orchestrator.store.records.codec import Fields
from stepfleet.orchestrator.store.runs.control import ControlOutcome, ControlResult
from stepfleet.orchestrator.store.runs.reading import (
    Found,
    StoredRun,
    ended_run,
    in_parts,
    steps_of,
)
from stepfleet.orchestrator.store.store import Store

log = logging.getLogger(__name__)

ROWS = 500
"""Rows whose statuses are read at once."""
RUNS = 100
"""Runs that are read, and retried, at once."""
_SHARED = 100
_ONE_BY_ONE = ControlResult(ControlOutcome.CHANGED)


@dataclass(slots=True)
class _Retry:
    """The progress of one request. `shared` is by configuration and overrides."""

    overrides: Mapping[str, Any]
    pace: Pace
    retried: int = 0
    refused: int = 0
    why: ConfigurationError | None = None
    shared: dict[tuple[str, str], tuple[AgentConfig, Changes]] = field(default_factory=dict)

    def refuse(self, error: ConfigurationError) -> None:
        """Count a run that cannot be retried; the first reason is reported."""
        self.refused += 1
        self.why = self.why or error


class BatchRetry:
    """Retries the ended runs of a batch."""

    def __init__(self, store: Store, control: RunControl) -> None:
        self._store = store
        self._control = control

    async def retry(
        self,
        manifest: Manifest,
        wanted: frozenset[Lifecycle],
        overrides: Mapping[str, Any],
        on_rows: Callable[[int], None],
        selection: Selection,
    ) -> int:
        """Retry the selected runs whose status is `wanted`; return how many.

        Runs that would end at once again are left alone. Raises `ConfigurationError`, with the
        reason of the first, when that holds for all.
        """
        await load(self._store.connection, "retry")
        request = _Retry(overrides, Pace(self._store.connection))
        for first in range(0, manifest.rows, ROWS):
            last = min(first + ROWS, manifest.rows)
            run_ids = [run_id_of(manifest.batch_id, row) for row in range(first, last)]
            statuses = await self._store.batches.statuses(run_ids)
            pairs = zip(run_ids, statuses, strict=True)
            ended = [run_id for run_id, status in pairs if status in wanted]
            if selection.conditions and ended:
                found = await self._store.runs.failed(ended)
                ended = [run.run_id for run in found if selection.selects(run)]
            for at in range(0, len(ended), RUNS):
                await self._page(request, ended[at : at + RUNS])
            on_rows(last)
        if request.why and not request.retried:
            raise request.why
        if request.why:
            log.warning("%d runs were not retried: %s", request.refused, request.why.message)
        return request.retried

    async def _page(self, request: _Retry, run_ids: Sequence[str]) -> None:
        headers = await self._store.runs.headers(run_ids)
        for part in in_parts(zip(run_ids, headers, strict=True)):
            revised = await self._revised(request, part)
            results = await self._store.control.retry_all(revised, request.pace)
            for (run, _), result in zip(revised, results, strict=True):
                await self._note(request, run.run_id, result)

    async def _revised(
        self, request: _Retry, found: Sequence[Found]
    ) -> list[tuple[StoredRun, Revision]]:
        """Return the revisions of the runs that are still ended and may be retried."""
        logs = await self._store.runs.logs([(one, steps_of(header)) for one, header in found])
        now = await self._store.batches.now()
        revised = []
        for (run_id, header), steps in zip(found, logs, strict=True):
            try:
                if not header:
                    ensure_known(ControlResult(ControlOutcome.UNKNOWN), run_id)
                if not Lifecycle(header["status"]).is_terminal:
                    continue
                config, changes = await self._shared(request, header)
                run = ended_run(run_id, header, steps, config)
                revision = revise(run.state, run.log, changes.overrides, now)
                if revision.is_handoff:  # to an agent that other runs of the batch may not have
                    await self._note(request, run_id, _ONE_BY_ONE)
                    continue
                ensure_retryable(run, changes, revision)
            except ConfigurationError as error:
                request.refuse(error)
            else:
                revised.append((run, revision))
        return revised

    async def _shared(self, request: _Retry, header: Fields) -> tuple[AgentConfig, Changes]:
        """Return a run's configuration and what changes in it: the same for most of a batch."""
        stored = header.get("overrides", "")
        about = (header["config"], stored)
        if about not in request.shared:
            config = await self._store.configs.load(header["config"])
            config = with_stored_overrides(config, stored)
            changes = changes_of(config, read_overrides(stored), request.overrides)
            if len(request.shared) >= _SHARED:
                del request.shared[next(iter(request.shared))]
            request.shared[about] = config, changes
        return request.shared[about]

    async def _note(self, request: _Retry, run_id: str, result: ControlResult) -> None:
        try:
            if result.outcome is ControlOutcome.CHANGED:  # another client was faster
                result = await self._control.retry(run_id, request.overrides)
            request.retried += ensure_known(result, run_id).outcome is ControlOutcome.RETRIED
        except ConfigurationError as error:
            request.refuse(error)
