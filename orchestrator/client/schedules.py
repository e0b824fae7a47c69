"""Schedules as a client sees them: added, listed, paused, removed, run at once."""

import asyncio
import re
import secrets
from typing import Any, Unpack

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.overrides import stored_overrides
from stepfleet.orchestrator.batches.scheduling import PAUSED_LOOK, Scheduling
from stepfleet.orchestrator.batches.source import Given, open_input
from stepfleet.orchestrator.batches.submit import BatchOrder
from stepfleet.orchestrator.batches.ticks import check_times, due, tick_id
from stepfleet.orchestrator.client.batch import AsyncBatch
from stepfleet.orchestrator.client.inputs import BatchOptions, batch_order
from stepfleet.orchestrator.client.session import Client, Session
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.schedule import Missed, Overlap, Schedule, ScheduleView
from stepfleet.orchestrator.store.batches.schedules import Schedules

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

    def __init__(self, session: Session) -> None:
        self._session = session

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

        `cron` has five fields, or is @daily, @hourly, ...; further `options` are those of
        `submit_batch`. Raises `ConfigurationError` that lists bad lines, or names the field.
        """
        if not _NAME.fullmatch(name):
            msg = f"name is {name[:70]!r}; write 1 to 64 letters, digits and the signs . _ -"
            raise ConfigurationError(msg)
        own = {one: options.pop(one) for one in _OWN if one in options}  # type: ignore[misc]
        tz, jitter = own.get("tz", "UTC"), own.get("jitter", 0.0)
        client, store = await self._open()
        now = await store.now()
        await asyncio.to_thread(check_times, cron, tz, jitter, now)
        _check_word("missed", own.get("missed", "newest"), ("newest", "all", "skip"))
        _check_word("overlap", own.get("overlap", "allow"), ("allow", "skip"))
        for field in ("limit", "only_new", "after"):
            if options.get(field):
                raise ConfigurationError(f"{field} is of one batch; a schedule does not take it")
        config = await client.config_of(agent)
        order = batch_order(source, agent, None, options)
        rows, is_table = await asyncio.to_thread(_lines, order)
        checked = BatchOrder(
            source=[] if not rows else [_as_object(one) for one in rows],
            default_agent=config.name,
            agents={config.name: config},
            overrides=order.overrides,
            rules=order.rules,
        )
        await client.batch_submission.check(checked, client.accept)
        await client.store.configs.save(config)
        schedule = Schedule(
            name=name,
            cron=cron,
            agent=config.name,
            config=config.digest,
            rows=len(rows),
            rows_key=f"{name}:{secrets.token_hex(4)}",
            is_table=is_table,
            input_field=order.rules.input_field,
            id_field=order.rules.id_field,
            tenant=order.rules.tenant,
            priority=order.priority,
            overrides=stored_overrides(config, order.overrides),
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

    async def pause(self, name: str) -> ScheduleView:
        """Let a schedule rest: its ticks are left out. What was submitted goes on."""
        _, store = await self._open()
        view = await store.get(name)
        paused = view.schedule.model_copy(update={"paused": True})
        await store.change(paused, await store.now() + PAUSED_LOOK)
        return await store.get(name)

    async def resume(self, name: str) -> ScheduleView:
        """Let a paused schedule go on with its next tick; none of the pause is made up."""
        _, store = await self._open()
        view, now = await store.get(name), await store.now()
        if view.schedule.paused:
            going = view.schedule.model_copy(update={"paused": False})
            state = view.state.model_copy(update={"last_tick": now, "error": None, "tries": 0})
            await store.change(going, due(going, now, now).next_look)
            await store.note(name, state, due(going, now, now).next_look)
        return await store.get(name)

    async def remove(self, name: str) -> None:
        """Remove a schedule; its batches stay. Raises `ConfigurationError` where there is none."""
        _, store = await self._open()
        if not await store.is_there(name):
            await store.get(name)
        await store.remove(name)

    async def run_now(self, name: str) -> AsyncBatch:
        """Submit a schedule's batch now, beside its ticks, and return it."""
        client, store = await self._open()
        view = await store.get(name)
        when = f"now-{tick_id(await store.now())}"
        manifest = await Scheduling(client.store).submit(view.schedule, when)
        return AsyncBatch(self._session, manifest)

    async def _open(self) -> tuple[Client, Schedules]:
        client = await self._session.open()
        return client, Schedules(client.store.connection, client.store.keys)


def _lines(order: BatchOrder) -> tuple[list[bytes], bool]:
    """Return the lines as JSON. Raises `ConfigurationError` for bad ones, and for too many."""
    rows: list[bytes] = []
    size = 0
    with open_input(order.source, order.input_format) as source:
        for line in source:
            if line.data is None:
                msg = f"{source.name}, {line.unit} {line.number}: {line.problem}"
                raise ConfigurationError(msg)
            rows.append(bytes(line.data).strip())
            size += len(rows[-1])
            if len(rows) > MOST_ROWS or size > MOST_BYTES:
                msg = (
                    f"a schedule has up to {MOST_ROWS:,} lines of {MOST_BYTES // 1024 // 1024} MiB "
                    "together; let cron submit larger files by `stepfleet submit`"
                )
                raise ConfigurationError(msg)
        return rows, source.is_table


def _as_object(row: bytes) -> Any:
    import orjson  # noqa: PLC0415 - a schedule is seldom added

    try:
        return orjson.loads(row)
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"a line is no JSON: {error}") from None


def _check_word(field: str, given: str, words: tuple[str, ...]) -> None:
    if given not in words:
        raise ConfigurationError(f"{field} is {given!r}; write {', '.join(words)}")
