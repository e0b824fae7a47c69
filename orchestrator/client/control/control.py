"""Cancel, pause, resume, retry and further messages of runs by their ids.

Reads what a request needs, and tries again when somebody else changed the run first.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from celery import Celery

from stepfleet.orchestrator.agents.overrides import merged_overrides, stored_overrides
from stepfleet.orchestrator.batches.files.lines import parse_input
from stepfleet.orchestrator.client.control.resumable import (
    Changes,
    changes_of,
    ensure_not_completed,
    ensure_resumable,
)
from stepfleet.orchestrator.errors import ConflictError, SerializationError, StoreError
from stepfleet.orchestrator.protocol.revision import Revision, further_turn, revise
from stepfleet.orchestrator.store.runs.control import (
    ControlOutcome,
    ControlResult,
    new_request,
)
from stepfleet.orchestrator.store.runs.reading import StoredRun, unknown_run
from stepfleet.orchestrator.store.store import Store

log = logging.getLogger(__name__)

INTERRUPT = "stepfleet_interrupt"
INTERRUPT_BATCH = "stepfleet_interrupt_batch"
CANCEL_NOTE = "a cancel was requested"
_TRIES = 5
_BROADCAST_SECONDS = 5.0


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
        """Take a pause back."""
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


def ensure_retryable(run: StoredRun, changes: Changes, revision: Revision) -> None:
    """Raise `ConfigurationError` for a run that completed, or that a limit would end at once."""
    ensure_not_completed(run.run_id, run.state)
    ensure_resumable(run.run_id, changes.criteria, revision.state, "retry")


def ensure_known(result: ControlResult, run_id: str) -> ControlResult:
    """Return the result. Raises `NotFoundError` where there is no such run (any more)."""
    if result.outcome is ControlOutcome.UNKNOWN:
        raise unknown_run(run_id)
    return result
