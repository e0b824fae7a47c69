"""One submitted batch as its caller holds it: progress, results, requests to all its runs."""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.config import AgentConfig, RunOverrides, stored_overrides
from stepfleet.orchestrator.agents.prompt import places_in
from stepfleet.orchestrator.batches.check import BatchCheck, Problems
from stepfleet.orchestrator.batches.failures import FailureCount, Failures, failed_in
from stepfleet.orchestrator.batches.files.lines import input_of, one_of, parse_tenant
from stepfleet.orchestrator.batches.files.source import Given
from stepfleet.orchestrator.batches.files.tables import ResultTable, require_arrow, select
from stepfleet.orchestrator.batches.following import OF_PAGES, OF_RUNS
from stepfleet.orchestrator.batches.results import BatchResults, Pause, Results
from stepfleet.orchestrator.batches.selection import Selection
from stepfleet.orchestrator.client.audit import changes
from stepfleet.orchestrator.client.inputs import BatchOptions, Priority, batch_submission
from stepfleet.orchestrator.client.session import Client, FleetSession
from stepfleet.orchestrator.client.watching.standstill import (
    approvals_of_batch,
    explained_when_late,
    held_batch,
)
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.limits.limit import priority_of
from stepfleet.orchestrator.protocol.fold import OUTPUT, OUTPUTS, check_places
from stepfleet.orchestrator.records.batch import BatchPage, BatchProgress, FollowUp, Manifest
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.batches.requests import Swept
from stepfleet.orchestrator.store.batches.upkeep import follow_up_id
from stepfleet.orchestrator.store.fleet.overview import needs_of_batch
from stepfleet.orchestrator.store.limits import LimitWaits
from stepfleet.orchestrator.store.runs.control import new_request
from stepfleet.orchestrator.store.runs.listing import MOST_RUNS, Cursor

if TYPE_CHECKING:
    from pandas import DataFrame
    from pyarrow import Table
else:  # extras, which nothing imports before it needs them
    DataFrame = Table = Any

log = logging.getLogger(__name__)

OnProgress = Callable[[int], None]
AfterFailedRuns = Literal["skip", "stop"]
SAMPLED = 500
"""Runs of a batch that are looked at for the limits for which they wait."""
_RETRIED = frozenset({Lifecycle.FAILED, Lifecycle.STOPPED})
MOST_ROWS = 1_000
"""Rows of a page."""
MOST_FOLLOWING = 100
"""Batches that follow one batch."""


class ThenOptions(RunOverrides, total=False):
    """The options of `then` besides its input: for all runs of the batch that follows."""

    page: int | None
    until_one: bool
    after_failed: AfterFailedRuns
    name: str | None
    tenant: str | None
    priority: Priority | None


def batch_made(given: Mapping[str, Any], result: Any) -> str:
    """Return a batch that is submitted, as the audit names it: never by its lines."""
    name = given.get("name") or given["options"].get("name")
    return f"batch {result.id if result else name or ''}".rstrip()


def submission_of(batch: "AsyncBatch") -> str:
    """Return how a submission ended, as the audit has it."""
    runs = batch._manifest.total if batch.added is None else batch.added  # noqa: SLF001 - its own
    return f"done: batch {batch.id}, {runs:,} runs{'' if batch.is_new else ', as before'}"


class AsyncBatch:
    """A batch. `skipped` lists the problems of the lines that a submission left out.

    `is_new` is true where that submission created runs: false for a batch that was there before.
    `added` is how many rows a submission with `only_new` added; None where it made the batch.

    Requests answer with the number of runs that they reached.
    """

    def __init__(
        self,
        session: FleetSession,
        manifest: Manifest,
        problems: Problems | None = None,
        *,
        is_new: bool = False,
        added: int | None = None,
    ) -> None:
        self.skipped = problems.lines() if problems else ()
        self.is_new = is_new
        self.skipped_count = len(problems.rows) if problems else 0
        self.added = added
        self._session = session
        self._manifest = manifest

    @property
    def id(self) -> str:
        """The batch's id (UUID)."""
        return self._manifest.batch_id

    async def progress(self) -> BatchProgress:
        """Return the batch's progress."""
        return await (await self._session.store()).batches.progress(await self._read())

    @changes("submit", batch_made, submission_of)
    async def then(
        self,
        agent: Agent | str,
        input: str | None = None,  # noqa: A002 - the public name
        **options: Unpack[ThenOptions],
    ) -> "AsyncBatch":
        """Return the batch that begins when this one has ended, and works on its results.

        Without a `page` it has a run for each completed one, whose `input` may name `{output}`,
        `{input}` and `{id}`. With a `page` it has one run for each `page` rows, and `input` names
        `{outputs}`, a JSON list, and `{count}`; with `until_one` their results are taken in pages
        again, until one run is left: it alone is the batch that this returns. Each result is cut at
        8,000 characters. Runs that did not complete are left out; `after_failed="stop"` submits
        nothing then. Workers submit it: this client may end. The same arguments are the same batch.
        Other options are as in `submit_batch`. Raises `ConfigurationError` that names the field.
        """
        client = await self._session.open()
        manifest, is_new = await registered(client, self._manifest, agent, input, options)
        return AsyncBatch(self._session, manifest, is_new=is_new)

    async def _read(self) -> Manifest:
        """Return the manifest, read anew until all runs were created."""
        if not self._manifest.sealed:
            found = await (await self._session.store()).batches.find(self.id)
            self._manifest = found or self._manifest
        return self._manifest

    def run_ids(self) -> Iterator[str]:
        """Yield the ids of the batch's runs in the order of its lines, also of skipped ones."""
        return (run_id_of(self.id, row) for row in range(self._manifest.rows))

    async def results(
        self,
        *,
        ordered: bool = False,
        follow: bool = True,
        failed: bool = False,
        known: Mapping[str, datetime | None] | None = None,
    ) -> Results:
        """Yield results as runs end, or in the order of the lines.

        Ends early, with a warning in the log, where equal errors hold the batch.
        `follow=False` stops at what has ended by now; `failed=True` leaves out completed runs.
        A run that is retried while its results are followed as they end comes again. `known`
        are the `end_time`s, by run id, of results that the caller has: those are left out.
        """
        reader = await self._reader(known)
        read = reader.in_order if ordered else reader.as_they_end
        async with contextlib.aclosing(read(follow=follow, failed=failed)) as results:
            async for result in results:
                yield result

    async def _reader(self, known: Mapping[str, datetime | None] | None = None) -> BatchResults:
        client = await self._session.open()
        tick = client.quiet_of_batch(self.id).tick
        store = client.store
        return BatchResults(self._manifest, store.batches, store.results, tick, known)

    async def table(
        self,
        fields: str | Iterable[str] | None = None,
        *,
        ordered: bool = True,
        follow: bool = True,
        failed: bool = False,
    ) -> ResultTable:
        """Return results as the rows of a table on disk; close it in the end.

        `fields` names a result's fields (docs/formats.md), such as `id,structured.*,cost_usd`;
        the other arguments are those of `results`. Raises `ConfigurationError` for an unknown one.
        """
        table = ResultTable(select(fields))
        try:
            reader = await self._reader()
            read = reader.in_order if ordered else reader.as_they_end
            async with contextlib.aclosing(read(follow=follow, failed=failed)) as results:
                async for result in results:
                    table.add(result, reader.properties)
        except BaseException:
            table.close()
            raise
        return table

    async def to_arrow(
        self,
        fields: str | Iterable[str] | None = None,
        *,
        ordered: bool = True,
        follow: bool = True,
        failed: bool = False,
    ) -> Table:
        """Return results as an Arrow table, in memory; the arguments are those of `table`.

        Raises `ConfigurationError` without the extra `tables`.
        """
        require_arrow()
        with await self.table(fields, ordered=ordered, follow=follow, failed=failed) as table:
            return await asyncio.to_thread(table.to_arrow)

    async def to_pandas(
        self,
        fields: str | Iterable[str] | None = None,
        *,
        ordered: bool = True,
        follow: bool = True,
        failed: bool = False,
    ) -> DataFrame:
        """Return results as a pandas data frame; the arguments are those of `table`.

        Raises `ConfigurationError` without the extra `tables`.
        """
        require_arrow("pandas")
        with await self.table(fields, ordered=ordered, follow=follow, failed=failed) as table:
            return await asyncio.to_thread(table.to_pandas)

    async def wait(self, timeout: float | None = None) -> BatchProgress:  # noqa: ASYNC109
        """Return the progress when all runs have ended.

        Also where the submitter is gone and all that it created has ended: the progress then says
        `submission_stalled`, and submitting the same again creates the rest. And where equal errors
        hold the batch: `held` says why, and `resume` lets it go on.
        Raises `TimeoutError` after `timeout` seconds, which says why nothing moves; the batch goes
        on.
        """
        tick = (await self._session.open()).quiet_of_batch(self.id).tick
        async with explained_when_late(f"batch {self.id}", timeout, self._waits):
            pause = Pause(tick)
            done = -1
            while True:
                progress = await self.progress()
                if progress.over:
                    if progress.halted:
                        log.warning("batch %s is %s", self.id, progress.held_text)
                    return progress
                await pause.wait(idle=progress.done == done, left=progress.open)
                done = progress.done

    async def _waits(self) -> str:
        """Return how many runs have ended, and why nothing moves where that is known."""
        client, progress = await self._session.open(), await self.progress()
        if progress.waits:
            return f"it waits for the end of batch {progress.follows}"
        held = held_batch(client.store, self.id)
        approvals = approvals_of_batch(client.store, self.id)
        needs = partial(needs_of_batch, client.store, self.id)
        why = await client.standstill.reason(needs, held, approvals)
        done = f"{progress.done:,} of {progress.total:,} runs have ended"
        return f"{done}{f'; {why}' if why else ''}"

    async def watch(self, seconds: float = 0.5) -> AsyncGenerator[BatchProgress, None]:
        """Yield the progress every `seconds`, until nothing more happens; the last one too."""
        tick = (await self._session.open()).quiet_of_batch(self.id).tick
        last: BatchProgress | None = None
        while True:
            progress = await self.progress()
            yield progress
            if progress.over:
                return
            await tick(idle=progress == last)
            last = progress
            await asyncio.sleep(seconds)

    async def on_standstill(self, report: Callable[[str], None]) -> None:
        """Give `report` what the log gets by default: why no run moves.

        Reasons are a missing worker, queue or agent, and a server that refuses work. It gets an
        empty text when that is over. Applies to all waits of this client.
        """
        (await self._session.open()).standstill.report = report

    @changes("cancel", "batch {self.id}")
    async def cancel(self, on_progress: OnProgress | None = None) -> int:
        """Cancel the batch: from now on no step of it begins, and no run is created.

        Running steps are interrupted at once. Returns how many runs it ended, when all know of
        it; `on_progress` receives the number of rows so far. A worker completes the request
        if the caller is gone before.
        """
        control = (await self._session.open()).control
        swept = await self._request("cancel", on_progress, control.batch_cancel())
        # Interrupts tool calls that runs wait for; batches that wait for its end go on.
        if swept.held or (await self.progress()).next:
            await control.interrupt_batch(self.id)
        return swept.runs

    @changes("pause", "batch {self.id}")
    async def pause(self, on_progress: OnProgress | None = None) -> int:
        """Pause the batch: from now on no step of it begins; returns as `cancel` does."""
        return (await self._request("pause", on_progress)).runs

    @changes("resume", "batch {self.id}")
    async def resume(self, on_progress: OnProgress | None = None) -> int:
        """End pauses, also those not applied yet; return how many runs were paused."""
        return (await self._request("resume", on_progress)).runs

    async def _request(self, verb: str, on_progress: OnProgress | None, fields: str = "") -> Swept:
        """Put a request in force for the whole batch, then apply it to each of its runs."""
        client, manifest = await self._session.open(), await self._read()
        if manifest.level and not manifest.sealed:  # it waits for a batch of its own
            between = AsyncBatch(
                self._session, await client.store.batches.get(manifest.follows or "")
            )
            await between._request(verb, on_progress, fields)
        request = await client.store.requests.ask(manifest, verb, new_request(), fields)
        if verb == "cancel":
            await client.control.interrupt_batch(self.id)
        return await client.store.requests.sweep(request, on_progress or _ignore)

    @changes("retry", "batch {self.id}")
    async def retry(
        self,
        on_progress: OnProgress | None = None,
        *,
        where: str | Sequence[str] = (),
        failed_only: bool = True,
        **overrides: Unpack[RunOverrides],
    ) -> int:
        """Retry runs that did not complete; their committed steps are kept.

        `where` takes those that its conditions select, such as `error~"no such product",tool=stock`
        or the `where` of a group of `failures`: fields `error`, `code`, `tool`, `model`, `step`,
        `stop_reason`, `cause`, `agent`, with `=` or, for a part, `~`. `failed_only=False` retries
        cancelled runs too, as does a condition on `cause` or `stop_reason`. `overrides` raise
        limits and the like. Runs that would end at once again are left alone; when that holds for
        all, `ConfigurationError` says why. `on_progress` receives the number of rows so far;
        a repeated request goes on where an interrupted one ended.
        """
        selection = Selection.parse(where)
        also_cancelled = selection.with_cancelled or not failed_only
        wanted = _RETRIED | {Lifecycle.CANCELLED} if also_cancelled else _RETRIED
        retries = (await self._session.open()).retries
        return await retries.retry(
            await self._read(), wanted, overrides, on_progress or _ignore, selection
        )

    async def limit_waits(self) -> tuple[LimitWaits, ...]:
        """Return for which limits runs of the batch wait, by a sample of up to 500 of its runs."""
        store = await self._session.store()
        rows = (await self._read()).rows
        every = range(0, rows, max(-(-rows // SAMPLED), 1))
        return await store.limits.waits_of([run_id_of(self.id, row) for row in every])

    async def failures(
        self, on_progress: OnProgress | None = None, *, limit: int | None = None
    ) -> Failures:
        """Return the runs that did not complete by cause, with counts and an example of each.

        Reads only such runs, at most `limit` of them, page by page. `on_progress` receives the
        number of rows so far.
        """
        store = await self._session.store()
        progress = await self.progress()
        count = FailureCount()
        not_completed = progress.done - progress.completed
        pages = failed_in(self._manifest, store.batches, store.runs, on_progress or _ignore)
        if not_completed:
            async with contextlib.aclosing(pages):
                async for page in pages:
                    for run in page:
                        count.add(run)
                    if limit is not None and count.read >= limit:
                        break
        return count.failures(self.id, not_completed)


class AsyncFleetBatches:
    """The batches of a fleet: `fleet.batches`; `fleet.submit_batch` makes a new one."""

    def __init__(self, session: FleetSession) -> None:
        self._session = session

    async def get(self, batch_id: str) -> AsyncBatch:
        """Return a submitted batch. Raises `NotFoundError` if there is none of that id."""
        store = await self._session.store()
        return AsyncBatch(self._session, await store.batches.get(batch_id))

    async def newest(self, limit: int = 50) -> list[BatchProgress]:
        """Return the progress of the newest batches."""
        return await (await self._session.store()).batches.newest(limit)

    async def page(self, *, limit: int = 50, cursor: str | None = None) -> BatchPage:
        """Return up to `limit` batches, the newest first, after the `next` of the page before.

        Raises `ConfigurationError` that names the field.
        """
        if not 1 <= limit <= MOST_RUNS:
            raise ConfigurationError(f"limit is {limit}; write a number from 1 to {MOST_RUNS}")
        place = Cursor.parse(cursor) if cursor else None
        batches = (await self._session.store()).batches
        after = (place.place, place.run_id) if place else None
        found, last = await batches.page(limit, after)
        return BatchPage(batches=tuple(found), next=str(Cursor(*last)) if last else None)

    async def check(
        self,
        source: Given,
        agent: Agent | str | None = None,
        *,
        agents: Mapping[str, Agent] | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[BatchOptions],
    ) -> BatchCheck:
        """Check a batch as `submit_batch` does, without submitting: how many lines are good.

        Raises `ConfigurationError` for what concerns the whole batch.
        """
        key = idempotency_key
        submission = batch_submission(source, agent, options, agents, idempotency_key=key)
        client = await self._session.open()
        return await client.batch_submission.check(submission, client.accept)


def _ignore(_: int) -> None:
    return None


async def registered(
    client: Client,
    source: Manifest,
    agent: Agent | str,
    text: str | None,
    options: Mapping[str, Any],
) -> tuple[Manifest, bool]:
    """Return the batch that follows `source`, and whether it is new.

    The same arguments are the same batch. Raises `ConfigurationError` that names field and fix.
    """
    config = await client.config_of(agent)
    changes = dict(options)
    name = changes.pop("name", None)
    if not isinstance(name, str | None):
        raise ConfigurationError(f"field 'name' is {ascii(name)[:70]}; write a text")
    name = name or f"{source.name or source.batch_id}: {config.name}"
    plan = _plan(config, text, changes)
    digest = hashlib.sha256(plan.to_json().encode()).hexdigest()
    batch_id = follow_up_id(source.batch_id, digest)
    found, source = (
        await client.store.batches.find(batch_id),
        await client.store.batches.get(source.batch_id),
    )
    index = client.store.follow_ups
    if found and not found.refused:
        if not (found.sealed or found.cancel_requested):
            await index.wake(batch_id)  # the client that has registered it may have died before
        return found, False
    await _ensure_room(client, source)
    await client.accept([config])
    await client.store.configs.save(config)
    manifest = Manifest(
        batch_id=batch_id,
        key=f"then:{source.batch_id}",
        digest=digest,
        name=name[:500],
        agent=config.name,
        created=await client.store.batches.now(),
        total=0,
        rows=0,
        follows=source.batch_id,
        plan=plan,
    )
    await index.register(manifest)
    if await client.store.batches.is_over(source.batch_id, source):  # no worker will see it end
        await client.control.interrupt_batch(source.batch_id)
    return manifest, True


def _plan(config: AgentConfig, text: str | None, changes: Mapping[str, Any]) -> FollowUp:
    """Return what the batch does, checked; its name does not belong to that."""
    overrides = dict(changes)
    page = _page(overrides.pop("page", None))
    places = OF_RUNS if page is None else OF_PAGES
    text = f"{{{OUTPUT if page is None else OUTPUTS}}}" if text is None else text
    if page is None and isinstance(text, str) and (named := _of_pages(text)):
        msg = f"field 'input' names {{{named}}}, which pages have: give page=N, the rows of each"
        raise ConfigurationError(f"{msg}; the result of a single run is {{{OUTPUT}}}")
    check_places(text, places)
    input_of(text, "input", config.prompt)
    until_one, rule = overrides.pop("until_one", False), overrides.pop("after_failed", "skip")
    if until_one and page in (None, 1):
        raise ConfigurationError("field 'until_one' needs a 'page' of 2 rows or more, as page=100")
    return FollowUp(
        agent=config.name,
        config=config.digest,
        input=text,
        page=page,
        until_one=bool(until_one),
        after_failed=one_of(rule, "after_failed", AfterFailedRuns),
        tenant=parse_tenant(overrides.pop("tenant", None)),
        priority=priority_of(overrides.pop("priority", None)),
        overrides=stored_overrides(config, overrides),
    )


def _of_pages(text: str) -> str:
    """Return the first place that only an input of a page has; empty without one."""
    try:
        return next((one for one in places_in(text) if one in {*OF_PAGES} - {*OF_RUNS}), "")
    except ValueError:
        return ""


async def _ensure_room(client: Client, source: Manifest) -> None:
    """Raise `ConfigurationError` where no further batch can follow `source`."""
    if len(source.next) >= MOST_FOLLOWING:
        msg = f"{MOST_FOLLOWING} batches follow batch {source.batch_id}; let some follow others"
        raise ConfigurationError(msg)
    progress = await client.store.batches.progress(source)
    if progress.past_retention:
        msg = f"{progress.past_retention:,} results of batch {source.batch_id} are past retention"
        raise ConfigurationError(f"{msg}: submit it again, and what follows it with it")


def _page(given: Any) -> int | None:
    if given is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= MOST_ROWS:
        return given
    msg = f"field 'page' is {given!r}; write how many rows a run gets, 1 to {MOST_ROWS:,}"
    raise ConfigurationError(msg)
