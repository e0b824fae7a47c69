"""Submits batches whose runs work on the results of another batch, when that one has ended.

Row n stands for row n of the batch before, or for its n-th page of rows: so a worker that goes on
where another one died makes the same runs. Memory holds a page of results at a time.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.batches.files.lines import input_of
from stepfleet.orchestrator.batches.submit import take
from stepfleet.orchestrator.errors import ConfigurationError, SerializationError
from stepfleet.orchestrator.protocol.fold import (
    COUNT,
    OUTPUT,
    OUTPUTS,
    Before,
    answer_text,
    composed,
)
from stepfleet.orchestrator.records.batch import FollowUp, Manifest
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.state import AgentState, Lifecycle
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.batches.upkeep import follow_up_id
from stepfleet.orchestrator.store.codec import MESSAGES, Fields, reading
from stepfleet.orchestrator.store.compression import unpacked
from stepfleet.orchestrator.store.runs.submission import NewRun
from stepfleet.orchestrator.store.store import Store

log = logging.getLogger(__name__)

ROWS = 200
"""Rows of the batch before that are read together, unless one page has more."""
MOST_LEVELS = 20
"""Batches that one look submits, each of which has ended by then; the next look goes on."""
ROOM_SECONDS = 0.2
"""Between looks for room, where the number of active runs is limited."""
OF_RUNS = (OUTPUT, "input", "id")
OF_PAGES = (OUTPUTS, COUNT)
_FIELDS = ("status", "slim", "line", "tenant")


@dataclass(frozen=True, slots=True)
class CompletedRun:
    """A run of the batch before that has completed."""

    before: Before
    tenant: str | None
    given: str = ""


class _TurnLostError(Exception):
    """This worker was silent long enough for another to submit the batch."""


class FollowUpSubmission:
    """Looks after batches that follow others."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._batches = store.batches
        self._index = store.follow_ups
        self._submission = store.submission

    async def look(self, batch_id: str) -> None:
        """Submit a batch if the one before it has ended; twice does no harm.

        Raises `StoreError` when Redis stays out of reach, and `SerializationError` where only a
        newer version can read what it needs; any worker then goes on.
        """
        if not await self._index.take(batch_id):
            return
        try:
            for _ in range(MOST_LEVELS):
                if not await self._advance(batch_id):
                    break
        except _TurnLostError:
            return
        except ConfigurationError as error:  # it was cancelled meanwhile, or its agent is gone
            manifest = await self._batches.find(batch_id)
            if await self._index.hold(batch_id):
                if manifest and not manifest.cancel_requested:
                    await self._index.refuse(batch_id, error.message)
                await self._index.done(batch_id)
        finally:
            await self._index.release(batch_id)

    async def _advance(self, batch_id: str) -> bool:
        """Submit the batch, or the next one in between; return whether to look once more."""
        await self._index.put_off(batch_id)  # first: a call that comes from here on is newer
        manifest = await self._batches.find(batch_id)
        if manifest is None or manifest.plan is None or manifest.sealed:
            await self._index.done(batch_id)
            return False
        if manifest.cancel_requested:
            await self._batches.look_at(batch_id)
            await self._index.done(batch_id)
            return False
        plan, source = manifest.plan, await self._batches.find(manifest.follows or "")
        config = await self._config(plan)
        if source and not await self._batches.is_over(source.batch_id, source):
            return False
        why = await self._why_not(plan, source)
        await self._hold(batch_id)
        if why:
            await self._index.refuse(batch_id, why)
        elif source:
            target = await self._target(manifest, plan, source)
            await self._create(target, plan, config, source, batch_id)
            if target.batch_id != batch_id:
                await self._index.passed(batch_id, target.batch_id, manifest.level + 1)
            return True
        return False

    async def _hold(self, batch_id: str) -> None:
        if not await self._index.hold(batch_id):
            raise _TurnLostError

    async def _config(self, plan: FollowUp) -> AgentConfig:
        try:
            config = await self._store.configs.load(plan.config)
        except SerializationError as error:
            if await self._store.configs.has(plan.config):
                raise  # a newer version wrote it
            raise ConfigurationError(str(error)) from None
        await self._store.configs.save(config)  # it is used, though no run refers to it yet
        return config

    async def _why_not(self, plan: FollowUp, source: Manifest | None) -> str:
        """Return why nothing is to be submitted, or ''."""
        if source is None:
            return "the batch before was removed, or is past its retention"
        progress = await self._batches.progress(source)
        name = f"batch {source.batch_id}"
        if source.refused:
            return f"{name} has no runs: {source.refused}"
        if source.cancel_requested:
            return f"{name} was cancelled"
        failed = progress.total - progress.completed
        if failed and plan.after_failed == "stop":
            return f"{failed:,} of {progress.total:,} runs of {name} did not complete"
        return "" if progress.completed else f"no run of {name} completed"

    async def _target(self, manifest: Manifest, plan: FollowUp, source: Manifest) -> Manifest:
        """Return the batch to be created now: this one, or one in between."""
        rows = -(-source.rows // (plan.page or 1))
        if not plan.until_one or rows <= 1:
            await self._index.begin(manifest.batch_id, rows, rows, 0)
            return manifest.model_copy(update={"rows": rows})
        level = manifest.level + 1
        target = Manifest(
            batch_id=follow_up_id(manifest.batch_id, manifest.digest, level),
            key=manifest.key,
            digest=manifest.digest,
            name=f"{manifest.name}, level {level}",
            agent=manifest.agent,
            created=await self._batches.now(),
            total=rows,
            rows=rows,
            follows=source.batch_id,
            next=(manifest.batch_id,),
        )
        await self._batches.register(target)
        await self._index.link(source.batch_id, target.batch_id)
        return target

    async def _create(
        self, target: Manifest, plan: FollowUp, config: AgentConfig, source: Manifest, waits: str
    ) -> None:
        """Create the runs of `target`, for the sake of the batch that `waits`."""
        page = plan.page or 1
        at_once, created = max(ROWS // page, 1), 0
        for first in range(0, target.rows, at_once):
            await self._hold(waits)
            rows = range(first, min(first + at_once, target.rows))
            there = await self._batches.statuses([run_id_of(target.batch_id, n) for n in rows])
            lacking = [n for n, status in zip(rows, there, strict=True) if status is None]
            found = {n: await self._read(plan, source, n * page, page) for n in lacking}
            drafts = await asyncio.to_thread(_drafts, target, plan, config, found)
            await self._submit(iter(drafts), waits)
            created += len(rows) - len(lacking) + len(drafts)
        if not created:
            await self._index.begin(target.batch_id, 0, 0, 0)
            raise ConfigurationError(f"the results of batch {source.batch_id} were removed")
        done = await self._batches.progress(source)
        left_out = done.total - done.completed
        await self._index.begin(target.batch_id, target.rows, created, left_out)
        await self._batches.seal(target.batch_id)

    async def _submit(self, runs: Iterator[NewRun], waits: str) -> None:
        while True:
            if (room := await self._submission.room()) == 0:  # as many are active as there may be
                await self._hold(waits)
                await asyncio.sleep(ROOM_SECONDS)
            elif some := take(runs, ROWS if room is None else room):
                await self._submission.submit_all(some)
            else:
                return

    async def _read(
        self, plan: FollowUp, source: Manifest, first: int, page: int
    ) -> tuple[CompletedRun, ...]:
        """Return the completed ones of a page of rows."""
        rows = range(first, min(first + page, source.rows))
        run_ids = [run_id_of(source.batch_id, row) for row in rows]
        headers = await self._store.runs.headers(run_ids, _FIELDS)
        found = [
            (run_id, header)
            for run_id, header in zip(run_ids, headers, strict=True)
            if header.get("status") == Lifecycle.COMPLETED
        ]
        ended = await asyncio.to_thread(lambda: tuple(_ended(*one) for one in found))
        if plan.page or "{input}" not in plan.input:
            return ended
        logs = [(f"{self._store.keys.run(run_id)}:log", "input:0") for run_id, _ in found]
        given = await self._store.reads.execute_all(*(("HGET", *one) for one in logs))
        pairs = zip(ended, given, strict=True)
        return tuple(replace(one, given=_last_text(text)) for one, text in pairs)


def _ended(run_id: str, header: Fields) -> CompletedRun:
    with reading:
        state = AgentState.from_json(unpacked(header["slim"]))
    text = answer_text(state.last_output, state.answer.structured if state.answer else None)
    return CompletedRun(Before(header.get("line") or run_id, text), header.get("tenant"))


def _last_text(stored: str | None) -> str:
    """Return the text of the last message of a run's input."""
    messages: Sequence[Message] = MESSAGES.validate_json(stored) if stored else ()
    return messages[-1].text if messages else ""


def _drafts(
    target: Manifest,
    plan: FollowUp,
    config: AgentConfig,
    found: dict[int, tuple[CompletedRun, ...]],
) -> list[NewRun]:
    """Return the runs of rows that have results."""
    changed = config.with_overrides(plan.overrides)
    return [
        _run(target, plan, changed, row, ended, config.digest)
        for row, ended in found.items()
        if ended
    ]


def _run(
    target: Manifest,
    plan: FollowUp,
    config: AgentConfig,
    row: int,
    ended: Sequence[CompletedRun],
    digest: str,
) -> NewRun:
    first, before = ended[0], [one.before for one in ended]
    others = {} if plan.page else {"input": first.given, "id": first.before.name}
    tenants = {one.tenant for one in ended}
    return NewRun(
        run_id=run_id_of(target.batch_id, row),
        agent=config.name,
        config=digest,
        messages=input_of(composed(plan.input, before, others), "input", config.prompt),
        max_steps=config.max_steps,
        model=config.model,
        batch_id=target.batch_id,
        row=row,
        line_id=f"page {row + 1}" if plan.page else first.before.name,
        overrides=plan.overrides,
        tenant=plan.tenant or (tenants.pop() if len(tenants) == 1 else None),
        priority=plan.priority,
    )
