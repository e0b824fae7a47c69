"""Cancel, pause, resume, retry: scripts on a run's header, each the point where it happens."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from stepfleet.orchestrator.events.envelope import Event, Events, EventType, status_payload
from stepfleet.orchestrator.protocol.claim import StepHint
from stepfleet.orchestrator.protocol.guards import cancelled_outcome
from stepfleet.orchestrator.protocol.revision import Revision
from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.records.usage import nano_usd
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.batches.requests import cancel_fields
from stepfleet.orchestrator.store.dispatch import Dispatch
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import loaded, run_script
from stepfleet.orchestrator.store.records.codec import MESSAGES, check_version, log_end, slim
from stepfleet.orchestrator.store.records.events import stored_events
from stepfleet.orchestrator.store.runs.reading import StoredRun
from stepfleet.orchestrator.store.runs.steps import ending
from stepfleet.orchestrator.store.runs.versions import note_version


class ControlOutcome(StrEnum):
    """What became of a request to a run."""

    CANCELLED = "cancelled"
    REQUESTED = "requested"
    """A worker holds the run and applies the request."""
    PAUSED = "paused"
    RESUMED = "resumed"
    ACTIVE = "active"
    """The run has not ended, or is not paused: nothing changed."""
    RETRIED = "retried"
    SENT = "sent"
    ENDED = "ended"
    CHANGED = "changed"
    """Somebody else changed the run first: nothing was done."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ControlResult:
    """The reply to a request; `detail` adds a status, a step (from 0) or a worker."""

    outcome: ControlOutcome
    detail: str = ""

    @property
    def in_hands(self) -> bool:
        """Whether a worker may hold the run, and is to be notified."""
        return self.outcome is ControlOutcome.REQUESTED or self.detail == "waiting"


def new_request() -> str:
    """Return the token of a request: by it a run recognizes a repetition."""
    return secrets.token_hex(6)


class Control:
    """Requests to a run from outside its worker.

    Each has a token, `request`, which a caller may draw beforehand (`new_request`): whoever asks
    again with the same one, as when a reply is lost, gets the first answer, and nothing is done.
    A run remembers the newest eight.
    """

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        dispatch: Dispatch,
        *,
        grace: float,
        retention: int,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._dispatch = dispatch
        self._grace_ms = round(grace * 1000)
        self._retention = retention

    async def cancel(self, run: StoredRun, note: str, request: str | None = None) -> ControlResult:
        """Cancel a run: at once if nobody holds it, else its worker ends it."""
        return await self.cancel_unread(run.run_id, note, request)

    async def cancel_unread(
        self, run_id: str, note: str, request: str | None = None
    ) -> ControlResult:
        """Cancel a run by its id, also one whose records this version cannot read."""
        fields = {
            "outcome": cancelled_outcome(note).to_json(),
            "note": note,
            "request": request or new_request(),
            **ending(StopReason.USER_REQUESTED, None, self._retention),
        }
        return await self._run("cancel", run_id, *_flat(fields))

    def batch_cancel(self, note: str) -> str:
        """Return the fields with which scripts end a run of a cancelled batch (JSON)."""
        end = ending(StopReason.USER_REQUESTED, None, self._retention)
        return cancel_fields(cancelled_outcome(note).to_json(), note, end)

    async def pause(self, run_id: str, request: str | None = None) -> ControlResult:
        """Pause a run before its next tool or step."""
        return await self._run("pause", run_id, request or new_request())

    async def resume(self, run: StoredRun, request: str | None = None) -> ControlResult:
        """Take a pause back."""
        hint = StepHint(run.run_id, run.step)
        message = self._dispatch.message(hint, run.agent)
        args = (self._grace_ms, message, request or new_request())
        result = await self._run("resume", run.run_id, *args)
        if result.outcome is ControlOutcome.RESUMED:
            await self._dispatch.published(hint, run.agent)
        return result

    async def retry(
        self,
        run: StoredRun,
        revision: Revision,
        given: tuple[Message, ...] = (),
        request: str | None = None,
    ) -> ControlResult:
        """Take an ended run up again where `revision` says, with messages `given` before it."""
        if check_version(run.header):
            await note_version(self._connection, self._keys, run.run_id)
        script = self._retry_script(run, revision, given, request or new_request())
        result = _result(await run_script(self._connection, *script))
        if result.outcome is ControlOutcome.RETRIED:
            await self._dispatch.published(StepHint(run.run_id, revision.step), run.agent)
        return result

    async def retry_all(self, revised: Sequence[tuple[StoredRun, Revision]]) -> list[ControlResult]:
        """Take several ended runs up again by calls that travel together.

        Answers in their order. Raises `StoreError` when Redis stays out of reach; what was taken
        up by then stays.
        """
        for run, _ in revised:
            if check_version(run.header):
                await note_version(self._connection, self._keys, run.run_id)
        requests = [new_request() for _ in revised]
        sent = [
            self._connection.send(*loaded(*self._retry_script(run, revision, (), request)))
            for (run, revision), request in zip(revised, requests, strict=True)
        ]
        replies = await asyncio.gather(*sent, return_exceptions=True)
        pairs = list(zip(revised, replies, strict=True))
        if not self._dispatch.in_script:
            await self._dispatch.publish(
                [
                    (StepHint(run.run_id, revision.step), run.agent)
                    for (run, revision), reply in pairs
                    if not isinstance(reply, BaseException) and reply[0] == "retried"
                ]
            )
        # One that failed, as where a server has lost its scripts, is repeated by itself.
        return [
            await self.retry(run, revision, request=request)
            if isinstance(reply, BaseException)
            else _result(reply)
            for ((run, revision), reply), request in zip(pairs, requests, strict=True)
        ]

    def _retry_script(
        self, run: StoredRun, revision: Revision, given: tuple[Message, ...], request: str
    ) -> tuple[Any, ...]:
        fields = {
            "expected": run.header.get("seq", ""),
            "request": request,
            "step": revision.step,
            "slim": slim(revision.state),
            "since": log_end(revision.state.window),
            "overrides": orjson.dumps(revision.overrides).decode() if revision.overrides else "",
            "message": self._dispatch.message(StepHint(run.run_id, revision.step), run.agent),
            "grace": self._grace_ms,
            "tokens": revision.removed.total_tokens,
            "calls": revision.removed.llm_calls,
            "cost": nano_usd(revision.removed_cost_usd),
            "events": stored_events(Events([_taken_up(run, revision)])),
            "event_count": 1,
            "lost": revision.lost.to_json() if revision.lost else "",
            "input": MESSAGES.dump_json(given, exclude_defaults=True) if given else "",
        }
        entries = zip(revision.journal[::2], revision.journal[1::2], strict=True)
        fields |= {f"journal:{name}": value for name, value in entries}
        keys = self._keys.script_keys(run.run_id, self._dispatch.queue_key)
        return ("retry", keys, run.run_id, *_flat(fields))

    async def _run(self, script: str, run_id: str, *args: Any) -> ControlResult:
        keys = self._keys.script_keys(run_id, self._dispatch.queue_key)
        reply = await run_script(self._connection, script, keys, run_id, *args)
        return _result(reply)


def _result(reply: Any) -> ControlResult:
    return ControlResult(ControlOutcome(reply[0]), str(reply[1]) if len(reply) > 1 else "")


def _taken_up(run: StoredRun, revision: Revision) -> Event:
    """Return the event that tells of it."""
    state = revision.state
    payload = status_payload(
        Lifecycle.IN_PROGRESS.value,
        before=run.state.status.value,
        steps=state.step_count,
        last_response=state.last_output,
    )
    info = state.info
    execution, at, parent = info.execution_id, info.updated_at, state.parent_agent_id
    return Event(EventType.STATUS, run.run_id, execution, at, payload, parent)


def _flat(fields: dict[str, Any]) -> list[Any]:
    return [item for pair in fields.items() for item in pair]
