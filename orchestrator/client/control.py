"""Cancel, pause, resume, retry and further messages of runs by their ids.

Reads what a request needs, and tries again when somebody else changed the run first.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from celery import Celery

from stepfleet.orchestrator.agents.agent import criteria_without_code
from stepfleet.orchestrator.agents.config import (
    AgentConfig,
    merged_overrides,
    read_overrides,
    stored_overrides,
    with_stored_overrides,
)
from stepfleet.orchestrator.batches.files.lines import parse_input
from stepfleet.orchestrator.batches.selection import Selection
from stepfleet.orchestrator.continuation.collection import ContinuationCriteria
from stepfleet.orchestrator.errors import (
    ConfigurationError,
    ConflictError,
    SerializationError,
    StoreError,
)
from stepfleet.orchestrator.protocol.revision import Revision, further_turn, revise
from stepfleet.orchestrator.records.batch import Manifest
from stepfleet.orchestrator.records.outcome import ContinuationOutcome, StopReason
from stepfleet.orchestrator.records.state import AgentState, Lifecycle
from stepfleet.orchestrator.store.batches.batches import pages_of
from stepfleet.orchestrator.store.codec import Fields
from stepfleet.orchestrator.store.lua import load
from stepfleet.orchestrator.store.pace import SweepPace
from stepfleet.orchestrator.store.runs.control import (
    ControlOutcome,
    ControlResult,
    new_request,
)
from stepfleet.orchestrator.store.runs.reading import (
    Found,
    StoredRun,
    archived_batch,
    ended_run,
    in_parts,
    steps_of,
    unknown_run,
)
from stepfleet.orchestrator.store.store import Store

log = logging.getLogger(__name__)

INTERRUPT = "stepfleet_interrupt"
INTERRUPT_BATCH = "stepfleet_interrupt_batch"
CANCEL_NOTE = "a cancel was requested"
_TRIES = 5
_BROADCAST_SECONDS = 5.0
_FIELDS = {
    StopReason.STEPS_LIMIT: "max_steps",
    StopReason.TOKEN_LIMIT: "token_limit",
    StopReason.TIME_LIMIT: "time_limit",
    StopReason.GUARD: "budget_usd",
}
ROWS = 500
"""Rows whose statuses are read at once."""
RUNS = 100
"""Runs that are read, and retried, at once."""
_SHARED = 100
_ONE_BY_ONE = ControlResult(ControlOutcome.CHANGED)


@dataclass(frozen=True, slots=True)
class Changes:
    """A run's changed configuration: all its `overrides`, and the criteria with its new limits."""

    overrides: dict[str, Any]
    criteria: ContinuationCriteria


def changes_of(
    config: AgentConfig, overrides: Mapping[str, Any], further: Mapping[str, Any]
) -> Changes:
    """Return the changes of a run whose `config` includes its `overrides`, with `further` ones.

    Runs with the same configuration and overrides can share it. Raises `ConfigurationError` that
    names the field where one is unknown or invalid.
    """
    own = stored_overrides(config, further)
    criteria = criteria_without_code(config.with_overrides(own))
    return Changes(merged_overrides(overrides, own), criteria)


def ensure_resumable(
    run_id: str, criteria: ContinuationCriteria, state: AgentState, verb: str
) -> None:
    """Raise `ConfigurationError`, with the fix, if a limit would end the run at once again.

    `verb` is the caller's: `retry`, `fork`, `restore`.
    """
    if not criteria.forbids(state):
        return
    outcome = criteria.evaluate(state)
    field = _FIELDS.get(outcome.stop_reason)
    fix = f"raise it: {verb} with {field}={_higher(outcome)}" if field else "change what it names"
    raise ConfigurationError(f"run {run_id} would end at once again ({outcome.reason}); {fix}")


def _higher(outcome: ContinuationOutcome) -> str:
    """Return twice the limit that a run has reached, or twice what it used."""
    facts = (one.context for one in outcome.evaluations if one.criterion == outcome.resolved_by)
    known = next(facts, {})
    numbers = [one for one in map(known.get, ("value", "limit")) if isinstance(one, int | float)]
    return str(round(2 * max(numbers), 6)) if numbers else "..."


def ensure_not_completed(run_id: str, state: AgentState) -> None:
    """Raise `ConfigurationError` for a completed run."""
    if state.status is Lifecycle.COMPLETED:
        msg = f"run {run_id} completed; there is nothing to retry (submit it as a new run)"
        raise ConfigurationError(msg)


def ensure_retryable(run: StoredRun, changes: Changes, revision: Revision) -> None:
    """Raise `ConfigurationError` for a run that completed, or that a limit would end at once."""
    ensure_not_completed(run.run_id, run.state)
    ensure_resumable(run.run_id, changes.criteria, revision.state, "retry")


def ensure_known(result: ControlResult, run_id: str) -> ControlResult:
    """Return the result. Raises `NotFoundError` where there is no such run (any more)."""
    if result.outcome is ControlOutcome.UNKNOWN:
        raise unknown_run(run_id)
    return result


class RunControl:
    """Requests to runs, by their ids. An unknown id raises `ConfigurationError`."""

    def __init__(self, store: Store, app: Celery) -> None:
        self._runs = store.runs
        self._control = store.control
        self._app = app

    async def cancel(self, run_id: str, note: str = CANCEL_NOTE) -> ControlResult:
        """Cancel a run and interrupt its step, if a worker is executing one."""
        result = await self.cancel_quietly(run_id, note)
        if result.in_hands:
            await self.interrupt([run_id])
        return result

    async def cancel_quietly(self, run_id: str, note: str = CANCEL_NOTE) -> ControlResult:
        """Cancel a run without notifying the worker that may hold it."""
        try:
            run = await self._runs.get(run_id)
        except SerializationError:
            return ensure_known(await self._control.cancel_unread(run_id, note), run_id)
        return await self._control.cancel(run, note)

    async def pause(self, run_id: str) -> ControlResult:
        """Pause a run at its next step boundary."""
        return ensure_known(await self._control.pause(run_id), run_id)

    async def resume(self, run_id: str) -> ControlResult:
        """End a run's pause."""
        return await self._control.resume(await self._runs.get(run_id))

    async def retry(self, run_id: str, overrides: Mapping[str, Any]) -> ControlResult:
        """Resume an ended run, with changes to its configuration.

        Raises `ConfigurationError` where a limit that the run has reached would end it again.
        """
        request = new_request()
        for _ in range(_TRIES):
            run = await self._runs.get(run_id)
            if not run.state.status.is_terminal:
                return ControlResult(ControlOutcome.ACTIVE, run.state.status.value)
            revision = revise(run.state, run.log, {}, await self._runs.now())
            if revision.is_handoff:
                run = await self._runs.as_before(run, revision.step)
            changes = changes_of(run.config, run.overrides, overrides)
            revision = replace(revision, overrides=changes.overrides)
            ensure_retryable(run, changes, revision)
            result = await self._control.retry(run, revision, request=request)
            if result.outcome is not ControlOutcome.CHANGED:
                return ensure_known(result, run_id)
        raise StoreError(f"run {run_id} is being changed all the time; try again")

    async def send(self, run_id: str, text: str, overrides: Mapping[str, Any]) -> ControlResult:
        """Give an ended run a further user message: a new execution on the same session.

        Raises `ConflictError` for one that has not ended: the message would be lost.
        """
        messages = parse_input(text, "text")
        request = new_request()
        for _ in range(_TRIES):
            run = await self._runs.get(run_id)
            if not run.state.status.is_terminal:
                msg = (
                    f"run {run_id} has not ended ({run.state.status.value}); send the message "
                    "when it has, or cancel it first"
                )
                raise ConflictError(msg)
            kept = merged_overrides(run.overrides, stored_overrides(run.config, overrides))
            turn = further_turn(run.state, run.log, kept, await self._runs.now())
            result = await self._control.retry(run, turn, messages, request)
            if result.outcome is ControlOutcome.RETRIED:
                return ControlResult(ControlOutcome.SENT, result.detail)
            # Another client was faster; a run that it resumed is refused by the next try.
            ensure_known(result, run_id)
        raise StoreError(f"run {run_id} is being changed all the time; try again")

    async def interrupt(self, run_ids: Sequence[str]) -> None:
        """Notify all workers to interrupt their steps of cancelled runs.

        A shortcut: without it a worker learns of the cancel when it renews its lease.
        """
        await self._notify(INTERRUPT, [{"run_id": run_id} for run_id in run_ids])

    async def interrupt_batch(self, batch_id: str) -> None:
        """Notify all workers to check their steps of a batch for requests: one message.

        They look whether it has ended, too: a shortcut for those that follow it.
        """
        await self._notify(INTERRUPT_BATCH, [{"batch_id": batch_id}])

    async def _notify(self, command: str, arguments: Sequence[dict[str, str]]) -> None:
        try:
            async with asyncio.timeout(_BROADCAST_SECONDS):
                await asyncio.to_thread(self._broadcast, command, arguments)
        except Exception as error:  # noqa: BLE001 - every broker has exceptions of its own
            log.warning("workers could not be notified at once: %s", error)

    def _broadcast(self, command: str, arguments: Sequence[dict[str, str]]) -> None:
        with self._app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, timeout=_BROADCAST_SECONDS)
            for one in arguments:
                self._app.control.broadcast(command, arguments=one, connection=connection)

    def batch_cancel(self) -> str:
        """Return the fields of a batch's cancel, as its scripts take them."""
        return self._control.batch_cancel(CANCEL_NOTE)


@dataclass(slots=True)
class _Retry:
    """The progress of one request. `shared` is by configuration and overrides."""

    overrides: Mapping[str, Any]
    pace: SweepPace
    retried: int = 0
    refused: int = 0
    why: ConfigurationError | None = None
    shared: dict[tuple[str, str], tuple[AgentConfig, Changes]] = field(default_factory=dict)

    def refuse(self, error: ConfigurationError, many: int = 1) -> None:
        """Count runs that cannot be retried; the first reason is reported."""
        self.refused += many
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
        request = _Retry(overrides, SweepPace(self._store.connection))
        rows = 0
        for run_ids in pages_of(manifest.batch_id, manifest.rows, ROWS):
            ended = await self._store.batches.in_states(run_ids, wanted)
            if moved := await self._store.reads.archived.where(ended):
                request.refuse(archived_batch(manifest.batch_id), len(moved))
                ended = [one for one in ended if one not in moved]
            if selection.conditions and ended:
                found = await self._store.runs.failed(ended)
                ended = [run.run_id for run in found if selection.selects(run)]
            for at in range(0, len(ended), RUNS):
                await self._page(request, ended[at : at + RUNS])
            on_rows(rows := rows + len(run_ids))
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
