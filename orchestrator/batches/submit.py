"""Submits a batch: all lines are checked first, then each becomes a run, many at a time.

Submitting the same thing again finds the batch and completes it; nothing happens twice.
"""

import asyncio
import hashlib
import logging
import sqlite3
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.batches.check import (
    BatchCheck,
    Checked,
    Draft,
    Plan,
    Problems,
    check,
    examine,
    spilled,
    valid_lines,
)
from stepfleet.orchestrator.batches.files.source import BatchInput, open_input
from stepfleet.orchestrator.errors import ConfigurationError, ConflictError, StoreError
from stepfleet.orchestrator.records.batch import Manifest, is_stalled
from stepfleet.orchestrator.records.calls.answers import After
from stepfleet.orchestrator.store.batches.batches import (
    Batches,
    batch_id_of,
    id_of_keyed_batch,
    limit_name,
    pages_of,
    run_id_of,
)
from stepfleet.orchestrator.store.codec import MESSAGES
from stepfleet.orchestrator.store.runs.submission import NewRun, Submission
from stepfleet.orchestrator.store.store import Store

READ_AT_ONCE = 50
"""Inputs in memory: each may have 1 MiB."""
_ANEW = "run the file without --only-new (only_new=True) for a batch of all its rows, paid again"


class KnownRows:
    """The rows that a batch has. `runs` counts them, `with_ids` those that have an id."""

    def __init__(self, keys: sqlite3.Connection) -> None:
        self.runs = self.with_ids = 0
        self._keys = keys

    def add(self, rows: Iterable[tuple[str, str | None]]) -> None:
        """Note runs by line id and, where that is empty, stored input."""
        for line_id, given in rows:
            if not line_id and given is None:
                msg = "runs of this file have no ids, and memory.trim_log has removed their inputs"
                raise ConfigurationError(f"{msg}: {_ANEW}")
            self.runs += 1
            self.with_ids += bool(line_id)
            key = _by_id(line_id) if line_id else _by_input((given or "").encode())
            self._keys.execute("INSERT OR IGNORE INTO known VALUES (?)", (key,))

    def lacks(self, draft: Draft) -> bool:
        """Return whether no run is this row's: none has its id, or, without an id, its input."""
        keys = [] if draft.line.line_id is None else [_by_id(draft.line.line_id)]
        if self.with_ids < self.runs:
            given = MESSAGES.dump_json(draft.line.messages, exclude_defaults=True)
            keys.append(_by_input(given))
        query = f"SELECT 1 FROM known WHERE key IN ({','.join('?' * len(keys))})"  # noqa: S608
        return self._keys.execute(query, keys).fetchone() is None


async def read_known(batches: Batches, manifest: Manifest, known: KnownRows) -> None:
    """Note the rows of all runs of a batch.

    Raises `ConfigurationError` where it cannot grow, or some of its runs are gone.
    """
    name = f"batch {manifest.batch_id} of this file"
    if manifest.cancel_requested:
        raise ConfigurationError(f"{name} was cancelled, and gets no more runs: {_ANEW}")
    if not manifest.sealed and not is_stalled(manifest, await batches.now()):
        msg = f"{name} is being submitted, or was a moment ago; repeat this command in 30 seconds"
        raise ConfigurationError(msg)
    for run_ids in pages_of(manifest.batch_id, manifest.rows, READ_AT_ONCE):
        known.add(await batches.rows(run_ids))
    gone = manifest.total - known.runs
    if manifest.sealed and gone > 0:
        raise ConfigurationError(
            f"{name}: {gone:,} of its runs are past their retention or were removed, so it is not "
            f"known which rows they were; {_ANEW}, or give the new rows as a file of their own"
        )


def check_addition(manifest: Manifest, known: KnownRows, new: int, total: int) -> None:
    """Raise `ConfigurationError` where no row of the file is known: its rows cannot be compared."""
    if known.runs and new == total:
        by = "ids (--id-field)" if known.with_ids else "inputs (prompt, --input-field)"
        raise ConfigurationError(
            f"none of the file's {total:,} rows is in batch {manifest.batch_id} of this file, "
            f"which has {known.runs:,}: compare their {by}; or {_ANEW}"
        )


def _by_id(line_id: str) -> str:
    return f"id:{line_id}"


def _by_input(stored: bytes) -> str:
    return hashlib.sha256(stored).hexdigest()


log = logging.getLogger(__name__)

CHUNK = 500
ALIVE_SECONDS = 5.0
_CANCELLED = (
    "batch %s was cancelled: nothing more of it is created; to run these lines, use another "
    "idempotency key"
)
CHUNK_BYTES = 1_000_000
"""Runs that are created together have so much text at most, or are one."""
CHUNKS_IN_FLIGHT = 4
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between looks for room, where the number of active runs is limited."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A submitted batch, the problems of the lines that were skipped, and how many were `added`.

    `is_new` is false where all of it had been submitted, or it was cancelled, before.
    """

    manifest: Manifest
    problems: Problems
    is_new: bool
    added: int | None = None


class BatchSubmission:
    """Submits batches to one store."""

    def __init__(self, store: Store) -> None:
        self._batches = store.batches
        self._limits = store.limits
        self._configs = store.configs
        self._submission = store.submission

    async def submit(
        self, submission: Submission, accept: Callable[[Sequence[AgentConfig]], Awaitable[None]]
    ) -> Submitted:
        """Submit a batch; existing runs stay as they are.

        `accept` receives the agents before the first run is created and raises
        `ConfigurationError` for those that no worker could run.
        """
        source = await asyncio.to_thread(open_input, submission.source, submission.input_format)
        with source:
            plan = await self._plan(submission, source)
            checked = await asyncio.to_thread(check, source, plan)
            await accept(plan.configs)
            if submission.after:
                await self._batches.ensure_runs(submission.after.ids)
            if submission.only_new and checked.before:
                msg = "lines that wait for others are submitted together; leave only_new out"
                raise ConfigurationError(f"field 'after': {msg}")
            earlier = await self._earlier(checked) if submission.only_new else None
            if earlier and (earlier.sealed or earlier.digest != checked.digest):
                return await self._add(checked, earlier)
            manifest = await self._register(checked)
            if manifest.cancel_requested:
                log.warning(_CANCELLED, manifest.batch_id)
            elif not manifest.sealed:
                whole = await self._complete(checked, manifest, valid_lines(checked))
                return Submitted(whole, checked.problems, is_new=True)
        return Submitted(manifest, checked.problems, is_new=False)

    async def check(
        self, submission: Submission, accept: Callable[[Sequence[AgentConfig]], Awaitable[None]]
    ) -> BatchCheck:
        """Look at a batch as `submit` does, and create nothing. Bad lines are in the answer.

        Raises `ConfigurationError` for what concerns the whole batch.
        """
        source = await asyncio.to_thread(open_input, submission.source, submission.input_format)
        with source:
            plan = await self._plan(submission, source)
            checked = await asyncio.to_thread(examine, source, plan)
        await accept(plan.configs)
        batch_id, found = await self._found(checked)
        is_there = found is not None and await self._batches.has_runs(batch_id)
        return BatchCheck(
            lines=checked.rows,
            good=checked.total,
            bad=len(checked.problems.rows),
            problems=tuple(checked.problems.shown),
            agents=tuple(plan.agents),
            format=plan.format or "stepfleet",
            batch_id=batch_id,
            known=found.total if found and is_there else 0,
        )

    async def _add(self, checked: Checked, earlier: Manifest) -> Submitted:
        """Add the rows that the earlier batch of the file lacks, after those that it has."""
        with closing(spilled("CREATE TABLE known (key TEXT PRIMARY KEY) WITHOUT ROWID")) as keys:
            known = KnownRows(keys)
            await read_known(self._batches, earlier, known)

            def lacking() -> Iterator[Draft]:
                return (draft for _, draft in valid_lines(checked) if known.lacks(draft))

            new = await asyncio.to_thread(lambda: sum(1 for _ in lacking()))
            check_addition(earlier, known, new, checked.total)
            if new or not earlier.sealed:
                names = {*earlier.agent.split(", "), *checked.plan.agents}
                total, agent = known.runs + new, ", ".join(sorted(names))
                manifest = await self._batches.extend(earlier, new, total, agent)
                drafts = enumerate(lacking(), earlier.rows)
                earlier = await self._complete(checked, manifest, drafts)
        return Submitted(earlier, checked.problems, is_new=new > 0, added=new)

    async def _earlier(self, checked: Checked) -> Manifest | None:
        """Return the batch of the idempotency key, or the newest one of its file and agents."""
        submission, path = checked.plan.submission, checked.source.path
        if submission.idempotency_key:
            found = await self._batches.find(id_of_keyed_batch(submission.idempotency_key))
            if found:
                return found
        if not path and not submission.name:
            raise ConfigurationError("only_new needs a file or a name, to find its batch by")
        found = await self._batches.newest_of(path, submission.name or "", checked.plan.agents)
        if found and submission.idempotency_key:
            msg = (
                f"batch {found.batch_id} of this file is not this command's: add to it with "
                "stepfleet submit FILE --only-new, or without an idempotency key"
            )
            raise ConfigurationError(msg)
        return found

    async def _complete(
        self, checked: Checked, manifest: Manifest, drafts: Iterator[tuple[int, Draft]]
    ) -> Manifest:
        submission = checked.plan.submission
        for config in checked.plan.configs:
            await self._configs.save(config)
        if submission.limit:  # before the first run: no call of the batch escapes it
            await self._limits.begin_with({limit_name(manifest.batch_id): submission.limit})
        async with self._seen_alive(manifest.batch_id):
            runs = (_new_run(manifest, row, draft, submission) for row, draft in drafts)
            await self._create_all(runs, submission.on_progress or (lambda _: None))
        await self._batches.seal(manifest.batch_id)
        return manifest.model_copy(update={"sealed": True})

    @asynccontextmanager
    async def _seen_alive(self, batch_id: str) -> AsyncIterator[None]:
        """Note every few seconds that this submitter is there."""

        async def note() -> None:
            while True:
                await asyncio.sleep(ALIVE_SECONDS)
                with suppress(StoreError):
                    await self._batches.submitting(batch_id)

        await self._batches.submitting(batch_id)
        noting = asyncio.create_task(note())
        try:
            yield
        finally:
            noting.cancel()
            await asyncio.gather(noting, return_exceptions=True)

    async def _plan(self, submission: Submission, source: BatchInput) -> Plan:
        """Make the plan in a thread, as its checks run in one, and look agents up from there."""
        loop = asyncio.get_running_loop()

        def named(name: str) -> AgentConfig:
            return asyncio.run_coroutine_threadsafe(self._configs.named(name), loop).result()

        return await asyncio.to_thread(Plan, submission, named, is_table=source.is_table)

    async def _register(self, checked: Checked) -> Manifest:
        """Return the batch's manifest as stored; if it was completed before, it is sealed."""
        batch_id, found = await self._found(checked)
        if found and not await self._batches.is_forgettable(found):
            unfinished = not found.sealed or found.cancel_requested
            if unfinished or await self._batches.has_runs(batch_id):
                return found
        plan, source = checked.plan, checked.source
        manifest = Manifest(
            batch_id=batch_id,
            key=_key_of(checked),
            digest=checked.digest,
            name=plan.submission.name or source.name,
            path=source.path,
            agent=", ".join(plan.agents),
            format=plan.format or "stepfleet",
            created=await self._batches.now(),
            total=checked.total,
            rows=checked.rows,
        )
        if found:
            await self._batches.forget(batch_id)
        await self._batches.register(manifest)
        await self._batches.tidy()
        return manifest

    async def _found(self, checked: Checked) -> tuple[str, Manifest | None]:
        """Return the batch's id, and what is stored of it.

        Raises `ConflictError` where its key is another batch's.
        """
        batch_id = batch_id_of(_key_of(checked))
        found = await self._batches.find(batch_id)
        if found and found.digest != checked.digest:
            key = checked.plan.submission.idempotency_key
            msg = (
                f"idempotency key {key!r} belongs to batch {batch_id}, whose lines, agents or "
                "overrides differ from these; use another key for another batch"
            )
            raise ConflictError(msg)
        return batch_id, found

    async def _create_all(self, runs: Iterator[NewRun], report: Callable[[int], None]) -> None:
        """Create the runs, a bounded number in flight: memory here does not grow with the file."""
        in_flight: set[asyncio.Task[int]] = set()
        create, submitted = self._submission.submit_all, 0
        try:
            while chunk := await asyncio.to_thread(take, runs, await self._room(in_flight)):
                # The first one alone: it loads the script for all others.
                if not submitted and not in_flight:
                    submitted += await create([chunk.pop(0)])
                in_flight.add(asyncio.create_task(create(chunk)))
                if len(in_flight) >= CHUNKS_IN_FLIGHT:
                    done, in_flight = await asyncio.wait(
                        in_flight, return_when=asyncio.FIRST_COMPLETED
                    )
                    submitted += sum(task.result() for task in done)
                    report(submitted)
            for task in in_flight:
                submitted += await task
            report(submitted)
        finally:
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)

    async def _room(self, in_flight: Collection[asyncio.Task[int]]) -> int:
        """Return how many runs may be created now, as soon as there are some."""
        room = await self._submission.room()
        if room is None:
            return CHUNK
        if in_flight:  # those are not counted yet
            await asyncio.wait(in_flight)
            room = await self._submission.room()
        pause = FIRST_PAUSE
        while not room:
            if pause == FIRST_PAUSE:
                log.warning("as many runs are active as max_active_runs allows: waiting for room")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            room = await self._submission.room()
        return min(room, CHUNK)


def _key_of(checked: Checked) -> str:
    given = checked.plan.submission.idempotency_key
    return f"key:{given}" if given else f"content:{checked.digest}"


def take(runs: Iterator[NewRun], most: int) -> list[NewRun]:
    """Return the next runs: up to `most`, with little text together, or one."""
    taken: list[NewRun] = []
    left = CHUNK_BYTES
    while left > 0 and len(taken) < most and (one := next(runs, None)):
        taken.append(one)
        contents = (message.content for message in one.messages)
        left -= sum(len(text if isinstance(text, str) else str(text)) for text in contents)
    return taken


def _new_run(manifest: Manifest, row: int, draft: Draft, submission: Submission) -> NewRun:
    config, line = draft.config, draft.line
    return NewRun(
        run_id=run_id_of(manifest.batch_id, row),
        agent=config.name,
        config=draft.digest,
        messages=line.messages,
        max_steps=draft.max_steps,
        model=draft.overrides.get("model") or config.model,
        batch_id=manifest.batch_id,
        row=row,
        line_id=line.line_id,
        overrides=draft.overrides,
        metadata=line.metadata,
        tenant=line.tenant,
        priority=submission.priority,
        limited=submission.limit is not None,
        after=_after(manifest, draft, submission),
    )


def _after(manifest: Manifest, draft: Draft, submission: Submission) -> After | None:
    line = draft.line
    ids = (run_id_of(manifest.batch_id, row) for row in draft.before)
    runs = dict(zip(line.after, ids, strict=True))
    if submission.after:
        runs |= submission.after.runs
    return After(runs=runs, text=line.template, failed=line.after_failed) if runs else None
