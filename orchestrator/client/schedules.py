"""Schedules as a client sees them: added, listed, paused, removed, run at once."""

import asyncio
import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.config import stored_overrides
from stepfleet.orchestrator.batches.files.lines import one_of
from stepfleet.orchestrator.batches.files.source import BatchInput, Given, open_input
from stepfleet.orchestrator.batches.scheduling import (
    PAUSED_LOOK,
    Scheduling,
    check_times,
    due,
    tick_id,
)
from stepfleet.orchestrator.client.audit import changes
from stepfleet.orchestrator.client.batch import AsyncBatch, submission_of
from stepfleet.orchestrator.client.inputs import BatchOptions, batch_submission
from stepfleet.orchestrator.client.session import Client, FleetSession
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.schedule import Missed, Overlap, Schedule, ScheduleView
from stepfleet.orchestrator.store.batches.schedules import Schedules
from stepfleet.orchestrator.store.fleet.overview import is_looked_after
from stepfleet.orchestrator.store.runs.submission import Submission

MOST_ROWS, MOST_BYTES = 10_000, 8 * 1024 * 1024
"""Lines of a schedule, and their bytes as JSON."""
_OWN = ("tz", "jitter", "missed", "overlap", "paused")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class ScheduleOptions(BatchOptions, total=False):
    """How a schedule ticks, and the options of its batches.

    `tz` names a time zone (UTC), `jitter` is in seconds. `missed` and `overlap`: see `Schedule`.
    """

    tz: str
    jitter: float
    missed: Missed
    overlap: Overlap
    paused: bool


class AsyncFleetSchedules:
    """Batches that are submitted again and again: `fleet.schedules`. Workers submit them."""

    def __init__(self, session: FleetSession) -> None:
        self._session = session

    @changes("add", "schedule {name}")
    async def add(
        self,
        name: str,
        source: Given,
        agent: Agent | str,
        *,
        cron: str,
        **options: Unpack[ScheduleOptions],
    ) -> ScheduleView:
        """Store a schedule, with the lines of `source` and the agent as it is now, and return it.

        `cron` has five fields, or is @daily, @hourly, @every 15m, ...; further `options` are those
        of `submit_batch`, and of each batch. Raises `ConfigurationError` that lists bad lines, or
        names the field.
        """
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            msg = f"name is {ascii(name)[:70]}; write 1 to 64 letters, digits and the signs . _ -"
            raise ConfigurationError(msg)
        own = {one: options.pop(one) for one in _OWN if one in options}  # type: ignore[misc]
        tz, jitter = own.get("tz", "UTC"), own.get("jitter", 0.0)
        client, store = await self._open()
        now = await store.now()
        await asyncio.to_thread(check_times, cron, tz, jitter, now)
        one_of(own.get("missed", "newest"), "missed", Missed)
        one_of(own.get("overlap", "allow"), "overlap", Overlap)
        if not isinstance(own.get("paused", False), bool):
            raise ConfigurationError(f"paused is {ascii(own['paused'])[:70]}; write True or False")
        for field in ("only_new", "after"):
            if options.get(field):
                raise ConfigurationError(f"{field} is of one batch; a schedule does not take it")
        config = await client.config_of(agent)
        given = replace(batch_submission(source, agent, options), agents={config.name: config})
        rows, is_table = await _checked_lines(client, given)
        await client.store.configs.save(config)
        schedule = Schedule(
            name=name,
            cron=cron,
            agent=config.name,
            config=config.digest,
            rows=len(rows),
            rows_key=f"{name}:{secrets.token_hex(4)}",
            is_table=is_table,
            input_field=given.input_field,
            id_field=given.id_field,
            tenant=given.tenant,
            priority=given.priority,
            limit=given.limit.model_dump(exclude_unset=True) if given.limit else None,
            overrides=stored_overrides(config, given.overrides),
            created=now,
            **own,
        )
        first = due(schedule, now, now).next_look
        look = now + PAUSED_LOOK if schedule.paused else first
        await store.add(schedule, config.to_json(), rows, look)
        return await store.get(name)

    async def all(self) -> list[ScheduleView]:
        """Return all schedules by their names."""
        return await (await self._open())[1].all()

    async def get(self, name: str) -> ScheduleView:
        """Return a schedule. Raises `ConfigurationError` where there is none of that name."""
        return await (await self._open())[1].get(name)

    @changes("pause", "schedule {name}")
    async def pause(self, name: str) -> ScheduleView:
        """Pause a schedule: its ticks are skipped. Batches that have begun continue."""
        _, store = await self._open()
        view = await store.get(name)
        paused = view.schedule.model_copy(update={"paused": True})
        await store.change(paused, await store.now())  # a worker may have died amid a tick
        return await store.get(name)

    @changes("resume", "schedule {name}")
    async def resume(self, name: str) -> ScheduleView:
        """Resume a paused schedule with its next tick; missed ticks are not made up."""
        _, store = await self._open()
        view, now = await store.get(name), await store.now()
        if view.schedule.paused:
            going = view.schedule.model_copy(update={"paused": False})
            state = view.state.model_copy(update={"last_tick": now, "error": None, "tries": 0})
            await store.go_on(going, state, due(going, now, now).next_look)
        return await store.get(name)

    @changes("remove", "schedule {name}")
    async def remove(self, name: str) -> None:
        """Remove a schedule; its batches stay. Raises `ConfigurationError` where there is none."""
        _, store = await self._open()
        if not await store.is_there(name):
            await store.get(name)
        await store.remove(name)

    @changes("submit", "schedule {name}", submission_of)
    async def run_now(self, name: str) -> AsyncBatch:
        """Submit a schedule's batch now, outside its ticks, and return it."""
        client, store = await self._open()
        view = await store.get(name)
        now = (await store.now()).replace(microsecond=0)
        when = f"now-{tick_id(now)}-{secrets.token_hex(3)}"
        manifest = await Scheduling(client.store).submit(view.schedule, now, when)
        await store.note_run_now(name, manifest.batch_id)
        return AsyncBatch(self._session, manifest)

    async def troubles(self, views: Sequence[ScheduleView]) -> dict[str, str]:
        """Return the problems of schedules, by name."""
        client, store = await self._open()
        now, served = await store.now(), await is_looked_after(client.store)
        found = ((one.schedule.name, one.trouble(now, served=served)) for one in views)
        return {name: text for name, text in found if text}

    async def _open(self) -> tuple[Client, Schedules]:
        client = await self._session.open()
        return client, client.store.schedules


async def _checked_lines(client: Client, given: Submission) -> tuple[list[bytes], bool]:
    """Return the lines as JSON, and whether they are rows of a table.

    Raises `ConfigurationError` that lists bad ones, and where there are too many.
    """
    with await asyncio.to_thread(open_input, given.source, given.input_format) as source:
        rows = await asyncio.to_thread(_lines, source)
        found = await client.batch_submission.check(replace(given, source=source), client.accept)
    if found.bad:
        start = f"{source.name}: {found.bad:,} of {found.lines:,} lines cannot be used"
        more = found.bad - len(found.problems)
        shown = [*map(str, found.problems), *([f"and {more:,} more"] if more else [])]
        raise ConfigurationError("\n  ".join((f"{start}, so no schedule was added", *shown)))
    return rows, source.is_table


def _lines(source: BatchInput) -> list[bytes]:
    """Return the lines that can be read. Raises `ConfigurationError` for too many."""
    rows: list[bytes] = []
    size = 0
    for line in source:
        rows.append(bytes(line.data or b"").strip())
        size += len(rows[-1])
        if len(rows) > MOST_ROWS or size > MOST_BYTES:
            msg = (
                f"a schedule has up to {MOST_ROWS:,} lines of {MOST_BYTES // 1024 // 1024} MiB "
                "together; let cron submit larger files by `stepfleet submit`"
            )
            raise ConfigurationError(msg)
    return rows
