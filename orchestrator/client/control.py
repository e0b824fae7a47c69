"""Cancel, pause, resume, retry and further messages of runs by their ids.

Reads what a request needs, and asks again when somebody was faster.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from celery import Celery

from stepfleet.orchestrator.agents.overrides import merged_overrides, stored_overrides
from stepfleet.orchestrator.batches.lines import parse_input
from stepfleet.orchestrator.client.resumable import (
    changes_of,
    check_allowed,
    check_has_not_completed,
)
from stepfleet.orchestrator.errors import ConfigurationError, SerializationError, StoreError
from stepfleet.orchestrator.protocol.revision import further_turn, revise
from stepfleet.orchestrator.store.runs.control import Answer, Control, new_request
from stepfleet.orchestrator.store.runs.reading import Runs, StoredRun

log = logging.getLogger(__name__)

INTERRUPT = "stepfleet_interrupt"
INTERRUPT_BATCH = "stepfleet_interrupt_batch"
CANCEL_NOTE = "a cancel was requested"
_TRIES = 5
_BROADCAST_SECONDS = 5.0


class RunControl:
    """Requests to runs, by their ids. An unknown id raises `ConfigurationError`."""

    def __init__(self, runs: Runs, control: Control, app: Celery) -> None:
        self._runs = runs
        self._control = control
        self._app = app

    async def cancel(self, run_id: str, note: str = CANCEL_NOTE) -> Answer:
        """Cancel a run; a step under way is told at once and broken off."""
        answer = await self.ask_cancel(run_id, note)
        if answer.in_hands:
            await self.interrupt([run_id])
        return answer

    async def ask_cancel(self, run_id: str, note: str = CANCEL_NOTE) -> Answer:
        """Cancel a run without telling the worker that may hold it."""
        try:
            run = await self._runs.get(run_id)
        except SerializationError:
            return known(await self._control.cancel_unread(run_id, note), run_id)
        return await self._control.cancel(run, note)

    async def pause(self, run_id: str) -> Answer:
        """Pause a run at its next step boundary."""
        return known(await self._control.pause(run_id), run_id)

    async def resume(self, run_id: str) -> Answer:
        """Take a pause back."""
        return await self._control.resume(await self._runs.get(run_id))

    async def retry(self, run_id: str, overrides: Mapping[str, Any]) -> Answer:
        """Take an ended run up again, with changes to its configuration.

        Raises `ConfigurationError` where a limit that the run has reached would end it again.
        """
        request = new_request()
        for _ in range(_TRIES):
            run = await self._runs.get(run_id)
            if not run.state.status.is_terminal:
                return Answer("active", run.state.status.value)
            answer = await self._retry(run, overrides, request)
            if answer.word != "changed":
                return known(answer, run_id)
        raise StoreError(f"run {run_id} is being changed all the time; try again")

    async def _retry(self, run: StoredRun, overrides: Mapping[str, Any], request: str) -> Answer:
        changes = changes_of(run.config, run.overrides, overrides)
        revision = revise(run.state, run.log, changes.overrides, await self._runs.now())
        check_has_not_completed(run.run_id, run.state)
        check_allowed(run.run_id, changes.criteria, revision.state, "retry")
        return await self._control.retry(run, revision, request=request)

    async def send(self, run_id: str, text: str, overrides: Mapping[str, Any]) -> Answer:
        """Give an ended run a further user message: a new execution on the same session.

        Raises `ConfigurationError` for one that has not ended: the message would be lost.
        """
        given = parse_input(text, "text")
        request = new_request()
        for _ in range(_TRIES):
            run = await self._runs.get(run_id)
            if not run.state.status.is_terminal:
                msg = (
                    f"run {run_id} has not ended ({run.state.status.value}); send the message "
                    "when it has, or cancel it first"
                )
                raise ConfigurationError(msg)
            kept = merged_overrides(run.overrides, stored_overrides(run.config, overrides))
            turn = further_turn(run.state, run.log, kept, await self._runs.now())
            answer = await self._control.retry(run, turn, given, request)
            if answer.word == "retried":
                return Answer("sent", answer.detail)
            # Somebody was faster: `active` is told by what is read next.
            known(answer, run_id)
        raise StoreError(f"run {run_id} is being changed all the time; try again")

    async def interrupt(self, run_ids: Sequence[str]) -> None:
        """Tell all workers to break off their steps of cancelled runs.

        Only haste: without it a worker learns of the cancel when it renews its lease.
        """
        await self._tell(INTERRUPT, [{"run_id": run_id} for run_id in run_ids])

    async def interrupt_batch(self, batch_id: str) -> None:
        """Tell all workers to look what is wanted of their steps of a batch: one message."""
        await self._tell(INTERRUPT_BATCH, [{"batch_id": batch_id}])

    async def _tell(self, command: str, told: Sequence[dict[str, str]]) -> None:
        try:
            async with asyncio.timeout(_BROADCAST_SECONDS):
                await asyncio.to_thread(self._broadcast, command, told)
        except Exception as error:  # noqa: BLE001 - every broker has exceptions of its own
            log.warning("workers could not be told of a cancel at once: %s", error)

    def _broadcast(self, command: str, told: Sequence[dict[str, str]]) -> None:
        with self._app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, timeout=_BROADCAST_SECONDS)
            for arguments in told:
                self._app.control.broadcast(command, arguments=arguments, connection=connection)

    def batch_cancel(self, note: str = CANCEL_NOTE) -> str:
        """Return the fields of a batch's cancel, as its scripts take them."""
        return self._control.batch_cancel(note)


def known(answer: Answer, run_id: str) -> Answer:
    """Return the answer. Raises `ConfigurationError` where there is no such run (any more)."""
    if answer.word == "unknown":
        msg = f"no run has the id {run_id!r}; ended runs are removed after the retention time"
        raise ConfigurationError(msg)
    return answer
