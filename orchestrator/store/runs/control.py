"""Cancel, pause, resume, retry: scripts on a run's header, each the point where it happens.

Ended runs are purged here, too, before their retention is over.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.protocol.guards import cancelled_outcome
from stepfleet.orchestrator.protocol.revision import Revision
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.base import well_formed
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.records.usage import nano_usd
from stepfleet.orchestrator.store import keys as names
from stepfleet.orchestrator.store.batches.batches import Batches
from stepfleet.orchestrator.store.batches.requests import cancel_fields
from stepfleet.orchestrator.store.codec import (
    MESSAGES,
    log_end,
    milliseconds,
    slim,
    status_event,
    stored_events,
    stored_loss,
)
from stepfleet.orchestrator.store.gateway import Gateway, Opened
from stepfleet.orchestrator.store.ledger import Payer, lines_of
from stepfleet.orchestrator.store.lua import ScriptCall, detail_of
from stepfleet.orchestrator.store.pace import SweepPace
from stepfleet.orchestrator.store.runs.reading import StoredRun, archived_run, unknown_run
from stepfleet.orchestrator.store.runs.returning import Returning
from stepfleet.orchestrator.store.runs.steps import ending

COST_FROM = "cost_from"
"""The step (from 0) from which a run's cost statistics count."""
PAUSED_BY = "paused_by"
"""The header's field of a run that was paused with the run that has started it: that run's id."""
PAGE = 500
PATIENCE, LOOK_SECONDS = 2.0, 0.2
"""For how long, and how often, runs are looked at again that owe their end to others."""
_RUN = "run:"


_IN_WORDS = {
    "cancelled": "was cancelled",
    "requested": "is running; the request takes effect at once, or after its current step",
    "paused": "was paused",
    "resumed": "was resumed",
    "retried": "is retried",
    "sent": "has the message and continues",
    "active": "has not ended",
    "ended": "has already ended",
    "changed": "changed in the meantime; repeat the request",
    "unknown": "is unknown",
}


class ControlOutcome(StrEnum):
    """The outcome of a request to a run."""

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
    """Another client changed the run first: nothing was done."""
    UNKNOWN = "unknown"


_AT_STEP = (ControlOutcome.RESUMED, ControlOutcome.RETRIED, ControlOutcome.SENT)


@dataclass(frozen=True, slots=True)
class ControlResult:
    """The reply to a request; `detail` adds a status, a step (from 0) or a worker."""

    outcome: ControlOutcome
    detail: str = ""

    @property
    def in_hands(self) -> bool:
        """Whether a worker may hold the run, and is to be notified."""
        return self.outcome is ControlOutcome.REQUESTED or self.detail == "waiting"

    @property
    def is_done(self) -> bool:
        """Whether the request changed the run, or its worker will."""
        return self.outcome not in ("active", "changed", "ended", "unknown")

    def __str__(self) -> str:
        """Return the outcome as it follows a run's id: `was cancelled`, `has already ended`."""
        words = _IN_WORDS[self.outcome]
        if self.outcome in _AT_STEP and self.detail:
            return f"{words} at step {int(self.detail) + 1}"
        if self.outcome is ControlOutcome.ACTIVE and not self.detail:  # of a resume
            return "is not paused"
        return f"{words} ({self.detail})" if self.detail else words


def new_request() -> str:
    """Return the token of a request: by it a run recognizes a repetition."""
    return secrets.token_hex(6)


_OF_ENDED = ("retry", "send", "mark")
"""Scripts that change a run which has ended."""


class Control(Gateway):
    """Requests to a run from outside its worker.

    Each has a token, `request`, which a caller may draw beforehand (`new_request`). A repetition
    with the same token, as after a lost reply, gets the first answer and changes nothing. A run
    remembers the newest eight tokens.
    """

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._grace_ms = round(opened.settings.grace * 1000)

    async def cancel(self, run: StoredRun, note: str, request: str | None = None) -> ControlResult:
        """Cancel a run: at once if nobody holds it, else its worker ends it."""
        return await self.cancel_unread(run.run_id, note, request)

    async def cancel_unread(
        self, run_id: str, note: str, request: str | None = None
    ) -> ControlResult:
        """Cancel a run by its id, also one whose records this version cannot read."""
        note = well_formed(note)
        return await self._run(
            "cancel",
            run_id,
            outcome=cancelled_outcome(note).to_json(),
            note=note,
            request=request or new_request(),
            **ending(StopReason.USER_REQUESTED, None, self._settings.lifetime),
        )

    def batch_cancel(self, note: str) -> str:
        """Return the fields with which scripts end a run of a cancelled batch (JSON)."""
        end = ending(StopReason.USER_REQUESTED, None, self._settings.lifetime)
        return cancel_fields(cancelled_outcome(note).to_json(), note, end)

    async def mark(self, run_id: str, name: str, value: str | int) -> None:
        """Note `value` under `name`. Raises `NotFoundError` if there is no run of that id."""
        if not await self._scripts.run("mark", run_id, name, value):
            if await self._reads.archived.where([run_id]):
                raise archived_run(run_id)
            raise unknown_run(run_id)

    async def pause(
        self, run_id: str, request: str | None = None, paused_with: str = ""
    ) -> ControlResult:
        """Pause a run before its next tool or step; it may be paused with another run."""
        return await self._run("pause", run_id, request or new_request(), paused_with)

    async def resume(self, run: StoredRun, request: str | None = None) -> ControlResult:
        """Let a paused run go on."""
        hint = Work(run.run_id, run.step)
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
        """Continue an ended run at the step of `revision`, with messages `given` before it.

        Where that takes a hand-off back, `run` has the agent before it (see `Runs.as_before`).
        """
        await self._pushing.ensure_version(run.run_id, run.header)
        fields = self._retry_fields(run, revision, given, request or new_request())
        result = await self._run("retry", run.run_id, **fields)
        if result.outcome is ControlOutcome.RETRIED:
            await self._dispatch.published(Work(run.run_id, revision.step), run.agent)
        return result

    async def retry_all(
        self, revised: Sequence[tuple[StoredRun, Revision]], pace: SweepPace
    ) -> list[ControlResult]:
        """Retry several ended runs by calls that travel together; return the answers in order.

        Raises `StoreError` when Redis stays out of reach; the retries made by then stay.
        """
        for run, _ in revised:
            await self._pushing.ensure_version(run.run_id, run.header)
        results: list[ControlResult] = []
        for group in pace.groups(revised):
            fields = [self._retry_fields(*pair, (), new_request()) for pair in group]
            replies = await pace.send(
                [
                    self._pushing.call("retry", run.run_id, **given)
                    for (run, _), given in zip(group, fields, strict=True)
                ]
            )
            if not self._dispatch.in_script:
                await self._dispatch.publish(
                    [
                        (Work(run.run_id, revision.step), run.agent)
                        for (run, revision), reply in zip(group, replies, strict=True)
                        if reply[0] == "retried"
                    ]
                )
            results += map(_result, replies)
        return results

    def _retry_fields(
        self, run: StoredRun, revision: Revision, given: tuple[Message, ...], request: str
    ) -> dict[str, Any]:
        state = revision.state
        reopened = status_event(
            state, Lifecycle.IN_PROGRESS, state.info.updated_at, before=run.state.status
        )
        fields = {
            "expected": run.header.get("seq", ""),
            "request": request,
            "step": revision.step,
            "slim": slim(revision.state),
            "since": log_end(revision.state.window),
            "overrides": exact_json.text(revision.overrides) if revision.overrides else "",
            "message": self._dispatch.message(Work(run.run_id, revision.step), run.agent),
            "grace": self._grace_ms,
            "anew": int(state.info.execution > run.state.info.execution),
            "tokens": revision.removed.total_tokens,
            "calls": revision.removed.llm_calls,
            "cost": nano_usd(revision.removed_cost_usd),
            "events": stored_events(reopened),
            "event_count": 1,
            "lost": stored_loss(revision.lost),
            "input": MESSAGES.dump_json(given, exclude_defaults=True) if given else "",
        }
        if revision.is_handoff:
            fields |= {name: run.header[name] for name in ("agent", "config")}
        if revision.taken_back is not None:
            payer = Payer(
                run.header.get("tenant") or "",
                run.agent,
                run.header.get("batch") or run.header.get("billed") or "",
                run.config.model,
            )
            if lines := lines_of(revision.taken_back, payer, sign=-1):
                fields["ledger"] = lines
            if revision.taken_back.default_priced:
                fields["guessed"] = fields["cost"]
        entries = zip(revision.journal[::2], revision.journal[1::2], strict=True)
        return fields | {f"journal:{name}": value for name, value in entries}

    async def _run(self, script: str, run_id: str, *args: Any, **fields: Any) -> ControlResult:
        result = _result(await self._pushing.run(script, run_id, *args, **fields))
        if result.outcome is ControlOutcome.UNKNOWN:
            for place in (await self._reads.archived.where([run_id])).values():
                if script in _OF_ENDED:
                    raise archived_run(run_id)
                return ControlResult(ControlOutcome.ENDED, place.status)
        return result


def _result(reply: Any) -> ControlResult:
    return ControlResult(ControlOutcome(reply[0]), detail_of(reply))


@dataclass(frozen=True, slots=True)
class Purge:
    """Which ended runs are to go: of one batch, of these end states, ended `older_than` s ago.

    Those of the archive too where it is said.
    """

    batch_id: str | None = None
    statuses: tuple[str, ...] = ()
    older_than: float = 0.0
    dry_run: bool = False
    archived: bool = False

    @property
    def is_whole_batch(self) -> bool:
        """Whether nothing of the batch is to stay."""
        return bool(self.batch_id) and not (self.statuses or self.older_than or self.dry_run)


class Purging(Gateway):
    """Purges one store."""

    def __init__(self, opened: Opened, batches: Batches, returning: Returning) -> None:
        super().__init__(opened)
        self._batches, self._returning = batches, returning

    async def purge(self, what: Purge) -> AsyncIterator[int]:
        """Remove matching runs, or count them in a dry run; yield their number after each page.

        Those whose end other runs are to learn go when they know it; where no worker tells them
        within two seconds, they stay. Of the archive go the files all of whose runs match.
        Repeating it is harmless. Raises `StoreError` when Redis stays out
        of reach, `ArchiveError` when the archive does.
        """
        before = milliseconds(await self._connection.now()) - round(what.older_than * 1000)
        statuses = f" {' '.join(what.statuses)} " if what.statuses else " "
        conditions = (statuses, before, what.batch_id or "", "1" if what.dry_run else "")
        done, owing = 0, list[str]()
        pace = SweepPace(self._connection)
        async for page in self.pages(what.batch_id):
            removed, left = await self._page(page, conditions, pace)
            done, owing = done + removed, owing + left
            yield done
        ends = time.monotonic() + PATIENCE
        while owing and time.monotonic() < ends:
            await asyncio.sleep(LOOK_SECONDS)
            pages = [owing[at : at + PAGE] for at in range(0, len(owing), PAGE)]
            owing = []
            for page in pages:
                removed, left = await self._page(page, conditions, pace)
                done, owing = done + removed, owing + left
            yield done
        if what.archived:
            batch = await self._batches.find(what.batch_id) if what.batch_id else None
            done += await self._returning.purge(batch, before, dry_run=what.dry_run)
            yield done
        if what.is_whole_batch and what.batch_id and not owing:
            await self._forget(what.batch_id)

    async def _page(
        self, page: Sequence[str], conditions: tuple[object, ...], pace: SweepPace
    ) -> tuple[int, list[str]]:
        """Return how many of these runs were removed, and those that owe their end to others."""
        removed, owing = 0, list[str]()
        for group in pace.groups(page):
            replies = await pace.send([_call(run_key, conditions) for run_key in group])
            removed += sum(reply > 0 for reply in replies)
            owing += [key for key, reply in zip(group, replies, strict=True) if reply < 0]
        return removed, owing

    async def pages(self, batch_id: str | None) -> AsyncIterator[Sequence[str]]:
        """Yield keys of runs that may have ended; other keys among them are no harm."""
        if batch_id is None:
            for server in await self._connection.servers():
                cursor = 0
                while True:
                    match = self._keys.of(f"{names.PREFIX}:{{s*}}:{_RUN}*")
                    cursor, found = await server.scan(cursor, match, PAGE, "HASH")
                    yield [str(key) for key in found]
                    if not int(cursor):
                        break
            return
        places: dict[int, int] = {}
        while ended := await self._batches.ended_after(batch_id, places, PAGE):
            places |= {one.shard: one.place for one in ended}
            yield [self._keys.run(run_id) for one in ended for run_id in one.run_ids]

    async def _forget(self, batch_id: str) -> None:
        """Remove the records of a batch, unless runs of it are open."""
        if await self._batches.open_runs(batch_id):
            return
        for shard in range(self._keys.shards):
            counters = self._keys.batch(shard, batch_id)
            await self._connection.execute("UNLINK", counters, self._keys.ended(shard, batch_id))
        await self._batches.forget(batch_id)


def _call(run_key: str, conditions: tuple[object, ...]) -> ScriptCall:
    tag, _, run_id = run_key.partition(_RUN)
    return ("purge", [run_key, f"{tag}due"], run_id, *conditions)
