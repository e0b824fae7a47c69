"""Existing runs by their ids: read, follow, control, remove."""

import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import Any, TypedDict, TypeVar, Unpack

from stepfleet.orchestrator.agents.config import RunOverrides
from stepfleet.orchestrator.batches.failures import FailureCount, Failures
from stepfleet.orchestrator.batches.selection import Selection
from stepfleet.orchestrator.client.approvals import AsyncFleetApprovals
from stepfleet.orchestrator.client.audit import changes
from stepfleet.orchestrator.client.control import CANCEL_NOTE
from stepfleet.orchestrator.client.inputs import time_given
from stepfleet.orchestrator.client.rendering import (
    LiveMessages,
    Recorded,
    RunView,
    UIMessage,
    rendered,
    view_of,
)
from stepfleet.orchestrator.client.session import FleetSession
from stepfleet.orchestrator.client.watching.follow import Steps
from stepfleet.orchestrator.client.watching.standstill import begins_after, explained_when_late
from stepfleet.orchestrator.client.watching.watch import cancel_is_left
from stepfleet.orchestrator.errors import ConfigurationError, ConflictError
from stepfleet.orchestrator.protocol.claim import Want
from stepfleet.orchestrator.records.base import well_formed
from stepfleet.orchestrator.records.calls.answers import After
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.records.run.summary import RunPage, RunTimeline, RunTree
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.settings.settings import LONGEST_SECONDS
from stepfleet.orchestrator.store.codec import MESSAGES
from stepfleet.orchestrator.store.runs.control import ControlResult, Purge
from stepfleet.orchestrator.store.runs.listing import MOST_IN_TREE, MOST_RUNS, Cursor, RunFilter
from stepfleet.orchestrator.store.runs.reading import StoredRun
from stepfleet.orchestrator.store.runs.timeline import MOST_STEPS

Events = AsyncGenerator[dict[str, Any], None]
Windows = AsyncGenerator[tuple[UIMessage, ...], None]

_ENDS = tuple(one.value for one in Lifecycle if one.is_terminal)
_FAILED = ("failed", "stopped")
_INPUT = "input:"
_BATCHES = 5
"""The newest batches, which are searched for a line."""
E = TypeVar("E", bound=StrEnum)
LONGEST_CONDITION = 500


class RunConditions(TypedDict, total=False):
    """Which runs `fleet.runs.page` lists."""

    status: Lifecycle | str | None
    stop_reason: StopReason | str | None
    agent: str | None
    batch: str | None
    where: str | None
    tenant: str | None
    parent: str | None
    error: str | None
    since: datetime | str | None


def run_filter(which: RunConditions) -> RunFilter:
    """Return the conditions but the batch. Raises `ConfigurationError` that names the field."""
    texts = [("agent", which.get("agent")), ("tenant", which.get("tenant"))]
    texts += [("parent", which.get("parent")), ("error", which.get("error"))]
    for name, text in texts:
        if text is not None and (len(text) > LONGEST_CONDITION or text != well_formed(text)):
            msg = f"{name}: write at most {LONGEST_CONDITION} characters of valid text"
            raise ConfigurationError(msg)
    return RunFilter(
        status=_one_of(Lifecycle, "status", which.get("status")),
        stop_reason=_one_of(StopReason, "stop_reason", which.get("stop_reason")),
        agent=which.get("agent"),
        tenant=which.get("tenant"),
        parent=which.get("parent"),
        error=which.get("error"),
        since=time_given("since", which.get("since")),
    )


def _one_of(kind: type[E], field: str, name: str | None) -> E | None:
    try:
        return None if name is None else kind(name)
    except ValueError:
        msg = f"{field}: there is no {ascii(name)[:60]}; write one of {', '.join(kind)}"
        raise ConfigurationError(msg) from None


def _purged(given: Mapping[str, Any], _: Any) -> str:
    if given["dry_run"]:
        return ""  # nothing is removed
    of_batch = f" of batch {given['batch']}" if given["batch"] else ""
    states = f", {' or '.join(given['statuses'])}" if given["statuses"] else ""
    age = f", ended {given['older_than']:g} s ago" if given["older_than"] else ""
    return f"ended runs{of_batch}{states}{age}"


class AsyncFleetRuns:
    """The runs of a fleet: `fleet.runs`. `page` lists them; all else goes by their ids.

    Read one: `result` for its result so far, `wait` for the final one, `view` for a chat window,
    `show` for everything stored. Follow one: `steps` for results of steps, `events` for the event
    log and streamed text, `display` for a chat window.
    """

    def __init__(self, session: FleetSession) -> None:
        self._session = session

    async def show(self, run_id: str) -> StoredRun:
        """Return all that is stored of a run. Raises `ConfigurationError` if there is none.

        A cancel that a dead worker left undone takes effect first.
        """
        client = await self._session.open()
        run = await client.store.runs.get(run_id)
        left = run.header.get("want") == Want.CANCEL
        if not (left and cancel_is_left(run.header, await client.store.runs.now())):
            return run
        await client.control.cancel_quietly(run_id, run.header.get("want_note", ""))
        return await client.store.runs.get(run_id)

    async def waits_for(self, run_id: str) -> dict[str, str]:
        """Return the runs that have to end before this one begins: ids and statuses.

        Of one that is still to be created the status is 'unknown'. Empty for a run that has begun,
        or ended. Raises `NotFoundError` if there is no such run.
        """
        store = await self._session.store()
        header = (await store.runs.get(run_id)).header
        if "after" not in header or Lifecycle(header["status"]).is_terminal:
            return {}
        runs = After.from_json(header["after"]).ids
        found = zip(runs, await store.batches.statuses(runs), strict=True)
        return {run: one.value if one else "unknown" for run, one in found if not _ended(one)}

    async def standstill(self, run_id: str) -> str:
        """Return why no worker takes up a run, with the fix; empty where nothing is wrong.

        That is where the fleet is paused, no worker is alive, or none with the run's agent or
        queue.
        """
        return await (await self._session.open()).standstill.of_run(run_id)

    async def find(self, text: str, batch: str | None = None) -> str:
        """Return the id of the run that `text` names: its own id, or that of its batch's line.

        A line is looked up in `batch`, else in the newest batch, else in the few before it.
        Raises `ConfigurationError` where there is none, or where several of these have it.
        """
        store = await self._session.store()
        if await store.batches.statuses([text]) != [None]:
            return text
        if batch is None:
            newest = await store.batches.newest(_BATCHES)
            searched = [await store.batches.get(one.batch_id) for one in newest]
        else:
            searched = [await store.batches.get(batch)]
        found: list[tuple[str, str]] = []
        for manifest in searched:
            if run_id := await store.batches.run_of_line(manifest, text):
                found.append((manifest.batch_id, run_id))
            if found and manifest is searched[0]:
                break
        return _the_only(found, text, batch)

    async def page(
        self, *, limit: int = 50, cursor: str | None = None, **which: Unpack[RunConditions]
    ) -> RunPage:
        """Return up to `limit` runs, the newest first by their creation; all conditions hold.

        `status` and `stop_reason` are names as `failed` and `time_limit`, `agent` and `tenant` the
        whole name ('' as tenant: runs without one), `parent` the run that has started them ('': no
        run has), `error` a part of the error's text, in which letters' case does not count, `since`
        the earliest time of creation, `batch` an id.
        `where` takes those runs that did not complete which `batch.retry` would select by it, as
        `cause=KEY`. `cursor` is the `next` of the page before; a page may be short, or
        empty, and have one. Raises `ConfigurationError` that names the field.
        """
        where = which.get("where")
        selection = Selection.parse(where) if where else None
        store = await self._session.store()
        asked = run_filter(which)
        if not 1 <= limit <= MOST_RUNS:
            raise ConfigurationError(f"limit is {limit}; write a number from 1 to {MOST_RUNS}")
        place = Cursor.parse(cursor) if cursor else None
        if (batch := which.get("batch")) is not None:
            asked = replace(asked, batch=await store.batches.get(batch))
        if selection is None:
            return await store.lists.page(asked, limit, place)

        async def selected(run_ids: Sequence[str]) -> set[str]:
            found = await store.runs.failed(run_ids)
            return {run.run_id for run in found if selection.selects(run)}

        return await store.lists.page(asked, limit, place, selected)

    async def failures(self, *, limit: int = MOST_RUNS, **which: Unpack[RunConditions]) -> Failures:
        """Return why the newest runs did not complete, by cause: `limit` failed and stopped ones.

        `which` are conditions as those of `page`, without a status. Raises `ConfigurationError`.
        """
        store = await self._session.store()
        count = FailureCount()
        for status in _FAILED:
            wanted: RunConditions = {**which, "status": status}
            page = await self.page(limit=limit, **wanted)
            for run in await store.runs.failed([one.run_id for one in page.runs]):
                count.add(run)
        return count.failures(which.get("batch") or "", count.read)

    async def timeline(
        self, run_id: str, *, first: int = 1, limit: int = 50, content: bool = True
    ) -> RunTimeline:
        """Return a run in short and up to `limit` of its steps, from the step `first` on.

        Texts are cut; without `content` those of model and tools are left out. `next` is the first
        step of the next page. Raises `ConfigurationError` that names the field, or for an unknown
        run.
        """
        for name, value, most in (("first", first, 1 << 31), ("limit", limit, MOST_STEPS)):
            if not 1 <= value <= most:
                raise ConfigurationError(f"{name} is {value}; write a number from 1 to {most}")
        store = await self._session.store()
        return await store.timelines.read(run_id, first, limit, content=content)

    async def tree(self, run_id: str, *, limit: int = 200) -> RunTree:
        """Return a run with up to `limit` runs below it, those of upper levels first.

        Raises `NotFoundError` for an unknown run, or a wrong limit.
        """
        if not 0 <= limit <= MOST_IN_TREE:
            raise ConfigurationError(f"limit is {limit}; write 0 to {MOST_IN_TREE:,}")
        return await (await self._session.store()).lists.tree(run_id, limit)

    async def result(self, run_id: str) -> AgentRunResult:
        """Return a run's result so far."""
        return (await self.show(run_id)).result()

    async def wait(
        self,
        run_id: str,
        timeout: float | None = None,  # noqa: ASYNC109 - the run goes on after it
    ) -> AgentRunResult:
        """Return a run's result when it has ended.

        Raises `TimeoutError` after `timeout` seconds, which names what the run waits for.
        """
        client = await self._session.open()
        await client.store.runs.get(run_id)
        async with explained_when_late(f"run {run_id}", timeout, partial(self._waits, run_id)):
            await client.watch.ended(run_id)
            return await self.result(run_id)

    async def _waits(self, run_id: str) -> str:
        """Return a run's status, and what it waits for where that is known."""
        status = (await self.show(run_id)).state.status
        if before := await self.waits_for(run_id):
            return f"it is {status}, and {begins_after(before)}"
        for ask in await AsyncFleetApprovals(self._session).of_run(run_id):
            what = f"an approval of {ask.tool!r}" if ask.kind == "approval" else "an answer"
            return f"it is {status}, and waits for {what} by a person: stepfleet approvals"
        why = await self.standstill(run_id)
        return f"it is {status}{f': {why}' if why else ''}"

    async def events(
        self, run_id: str, *, since: int = 0, follow: bool = False, chunks: bool = False
    ) -> Events:
        """Yield a run's events after number `since`; with `follow`, new ones until it has ended.

        `chunks` follows too, and adds the text while it is written and the starts of steps and
        tools when they happen (without a `sequence`, in place of their events), where the run
        streams them (`broadcast="standard"`); `StreamedText` folds the text. Raises
        `NotFoundError` for an unknown run.
        """
        client = await self._session.open()
        if follow or chunks:
            async for event in client.following.envelopes(run_id, since, chunks=chunks):
                yield event
            return
        await client.store.runs.get(run_id)
        after = "0"
        while True:
            events, after = await client.store.runs.events(run_id, after)
            for event in events:
                if event["sequence"] > since:
                    yield event
            if not events:
                return

    async def steps(self, run_id: str) -> Steps:
        """Yield a run's steps as they are committed, until it has ended."""
        async for step in (await self._session.open()).following.steps(run_id):
            yield step

    @changes("cancel", "run {run_id}")
    async def cancel(self, run_id: str, note: str = CANCEL_NOTE) -> ControlResult:
        """Cancel a run; a running step is interrupted at once.

        The outcome is `requested` where a worker holds the run. If that worker is dead and no
        other one is up, the first client that waits for the run or reads it after the lease
        completes the cancel.
        """
        return await (await self._session.open()).control.cancel(run_id, note)

    @changes("pause", "run {run_id}")
    async def pause(self, run_id: str) -> ControlResult:
        """Pause a run before its next tool or step; `fleet.pause` pauses all."""
        return await (await self._session.open()).control.pause(run_id)

    @changes("resume", "run {run_id}")
    async def resume(self, run_id: str) -> ControlResult:
        """End a run's pause."""
        return await (await self._session.open()).control.resume(run_id)

    @changes("retry", "run {run_id}")
    async def retry(self, run_id: str, **overrides: Unpack[RunOverrides]) -> ControlResult:
        """Continue an ended run at its failed step; committed steps are kept.

        `overrides` change its configuration, such as `max_steps=20`. Raises `ConfigurationError`
        when it completed, or when a limit that it has reached would end it at once again.
        """
        return await (await self._session.open()).control.retry(run_id, overrides)

    @changes("send", "run {run_id}")
    async def send(
        self, run_id: str, text: str, **overrides: Unpack[RunOverrides]
    ) -> ControlResult:
        """Give an ended run a further user message; it goes on with its whole conversation.

        Limits, counters and clocks start anew; the session's totals stay. `overrides` change
        its configuration from here on. Raises `NotFoundError` for an unknown run and
        `ConflictError` for one that has not ended.
        """
        return await (await self._session.open()).control.send(run_id, text, overrides)

    async def view(self, run_id: str) -> RunView:
        """Return a run's history as a chat window shows it, with what it stopped for.

        Raises `NotFoundError` if there is no such run.
        """
        run = await self.show(run_id)
        return view_of(run.result(), history_of(run))

    async def display(self, run_id: str, *, continuation: bool = False) -> Windows:
        """Yield all messages of a run's window at each change, until the run has ended.

        The last ones are its stored history, with the errors that came up. Text comes while it
        is written where the run streams it (`broadcast="standard"`); `continuation` shows the
        decision that ended the run, where its events include it. Raises `NotFoundError`
        if there is no such run.
        """
        run = await self.show(run_id)
        attempts = run.config.model_attempts
        window = LiveMessages(run_id, attempts=attempts, continuation=continuation)
        async for event in self.events(run_id):
            window.add(event)
        shown = window.reconcile(history_of(await self.show(run_id)))
        yield shown
        async for event in self.events(run_id, since=window.sequence, chunks=True):
            if window.add(event) and window.messages != shown:
                shown = window.messages
                yield shown
        whole = window.reconcile(history_of(await self.show(run_id)))
        if whole != shown:
            yield whole

    @changes("purge", _purged)
    async def purge(
        self,
        *,
        batch: str | None = None,
        statuses: Sequence[str] = (),
        older_than: float = 0.0,
        archived: bool = False,
        dry_run: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> int:
        """Remove ended runs with all that is kept of them; return their number.

        Without conditions that is every ended run; `batch` takes those of one batch, `statuses`
        those of some end states (`completed`, `stopped`, ...), `older_than` those that ended at
        least that many seconds ago. A batch counts them on, as it does expired ones; one that is
        purged whole and has no open runs is forgotten. With `dry_run` nothing is removed.
        What is in the archive stays, unless `archived`: then its files go all of whose runs are
        meant, and `statuses` cannot be given.
        `on_progress` receives the number so far after each page. Works while Redis is full; open
        runs stay, and so do those whose end others are still to learn, and runs below a `batch`.
        Raises `ConfigurationError` for an unknown batch or state, `ConflictError` for a whole batch
        of which runs are archived, unless `archived`.
        """
        if archived and statuses:
            msg = "archived: the archive's files go as wholes; leave statuses out"
            raise ConfigurationError(msg)
        for status in statuses:
            if status not in _ENDS:
                msg = f"no run ends as {status!r}; write one of {', '.join(_ENDS)}"
                raise ConfigurationError(msg)
        if not 0 <= older_than <= LONGEST_SECONDS or math.isnan(older_than):
            msg = f"older_than is {older_than}; write seconds from 0 to {LONGEST_SECONDS:,}"
            raise ConfigurationError(msg)
        store = await self._session.store()
        if batch is not None:
            manifest = await store.batches.get(batch)
            if manifest.archived and not (archived or statuses or older_than):
                msg = f"runs of batch {batch} are archived: add archived=True to remove them, too"
                raise ConflictError(msg)
        done, which = 0, Purge(batch, tuple(statuses), older_than, dry_run, archived)
        async for done in store.purging.purge(which):
            if on_progress is not None:
                on_progress(done)
        return done


def _the_only(found: Sequence[tuple[str, str]], text: str, batch: str | None) -> str:
    """Return the run that was found. Raises `ConfigurationError` for none or several."""
    match found:
        case [(_, run_id)]:
            return run_id
        case []:
            among = f"no run, and no line of the newest {_BATCHES} batches,"
            where = f"no line of batch {batch}" if batch else among
            older = "" if batch else "a line of an older batch needs --batch BATCH (batch=...); "
            msg = (
                f"{where} has the id {text!r}; {older}ended runs are removed after the retention "
                "time. 'stepfleet ls' lists runs, 'stepfleet status ID' shows a batch"
            )
        case _:
            names = ", ".join(f"{run_id} (batch {batch_id})" for batch_id, run_id in found)
            msg = f"several batches have a line {text!r}: {names}; name the run, or the batch"
    raise ConfigurationError(msg)


def inputs_of(run: StoredRun) -> dict[int, tuple[Message, ...]]:
    """Return what a stored run was given, by the number of steps that it had done by then."""
    return {
        int(name.removeprefix(_INPUT)): MESSAGES.validate_json(given)
        for name, given in run.fields.items()
        if name.startswith(_INPUT)
    }


def history_of(run: StoredRun) -> tuple[UIMessage, ...]:
    """Return the history of a stored run."""
    recorded = Recorded(
        run_id=run.run_id,
        started_at=run.state.info.started_at,
        inputs=inputs_of(run),
        log=run.log,
    )
    return rendered(recorded)


def _ended(status: Lifecycle | None) -> bool:
    return status is not None and status.is_terminal
