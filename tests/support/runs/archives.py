"""Ended runs that move to an archive, and all that clients see of them before and after."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.runs.packed_records import plain, plain_log
from support.runs.stored_runs import Bench, answered, bench, failed

from stepfleet.orchestrator import Agent, AsyncBatch, AsyncFleet
from stepfleet.orchestrator.archive.segments import read_all
from stepfleet.orchestrator.errors import NotFoundError, SerializationError
from stepfleet.orchestrator.records.archive import Archived
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.archived import ArchiveFile
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.runs.archive_files import DROP_MS, MARKER

LONG = {"lease": 600.0, "grace": 60}


@asynccontextmanager
async def archive(
    url: str, place: Path | str, agent: Agent | None = None, **settings: Any
) -> AsyncIterator[tuple[Bench, AsyncFleet]]:
    """Yield a store with an archive at a folder or URL, and a client.

    The client is told of it only where it needs credentials.
    The fleet has had it for long: nobody waits until all clients know.
    """
    at = f"file://{place}" if isinstance(place, Path) else place
    async with bench(url, agent, **{**LONG, "archive_url": at, **settings}) as desk:
        await desk.opened.configs.announce(desk.agent.config)
        await desk.opened.connection.execute("HSET", "sf:{archive}:state", "gathered", 1)
        told = {} if isinstance(place, Path) else {"archive_url": at}
        async with AsyncFleet(settings=load_settings(redis_url=url, **told)) as fleet:
            yield desk, fleet


async def ended(desk: Bench, text: str = "fine", *, well: bool = True, **fields: Any) -> str:
    """Return a run that has ended; without a batch, unless one is named."""
    return await end(desk, await desk.create(**{"batch": "", **fields}), text, well=well)


async def end(desk: Bench, run_id: str, text: str = "fine", *, well: bool = True) -> str:
    """Have a run end, and return it."""
    claim = await desk.claim(run_id)
    await desk.commit(claim, answered(claim, text) if well else failed(claim))
    return run_id


async def ended_batch(
    desk: Bench, fleet: AsyncFleet, rows: int, failing: Sequence[int] = ()
) -> AsyncBatch:
    """Return a batch all of whose runs have ended, some badly."""
    lines = [{"id": f"line-{n}", "input": f"question {n}"} for n in range(rows)]
    batch = await fleet.submit_batch(lines, agent=desk.agent)
    for row in range(rows):
        await end(desk, run_id_of(batch.id, row), f"answer {row}", well=row not in failing)
    await desk.keep_up()
    return batch


async def move(desk: Bench) -> Archived:
    """Move all that has ended to the archive."""
    return await desk.opened.archiving.run(0, lambda _: None)


async def older(desk: Bench) -> None:
    """Have an hour and more go by for the archive's files, and have them looked at."""
    archived = desk.opened.reads.archived
    for file in await files(desk):
        then, execute = file.at - DROP_MS - 1, desk.opened.connection.execute
        record = file.model_copy(update={"at": then}).to_json()
        await execute("HSET", "sf:{archive}:files", file.number, record)
        await execute("ZADD", "sf:{archive}:open", "XX", then, file.number)
        archived.forget(file.number)
    await move(desk)


async def in_redis(desk: Bench, run_ids: Sequence[str]) -> list[str]:
    """Return those of the runs of which Redis has anything itself."""
    keys, execute = desk.opened.keys, desk.opened.connection.execute
    parts = ("", ":log", ":journal", ":outcomes", ":lost", ":events")
    return [
        one
        for one in run_ids
        if any([await execute("EXISTS", f"{keys.run(one)}{part}") for part in parts])
    ]


async def files(desk: Bench) -> list[ArchiveFile]:
    """Return the files that Redis knows."""
    return [one async for one in desk.opened.reads.archived.files()]


async def check_files(desk: Bench) -> None:
    """Assert that Redis and the place know the same files, which are whole, in order and good."""
    known, archived = await files(desk), desk.opened.reads.archived
    place = archived.place()
    assert await place.names() == sorted([*(one.name for one in known), MARKER])
    order = await desk.opened.connection.execute("ZRANGE", "sf:{archive}:order", 0, -1)
    assert sorted(order) == sorted(one.member for one in known)
    for file in known:
        assert file.is_whole
        index, runs = read_all(await place.read(file.name))
        assert {one.run_id for one in index.runs} == set(runs)
        assert len(runs) == file.runs


async def seen(fleet: AsyncFleet, run_id: str) -> dict[str, Any]:
    """Return all that a client sees of a run."""
    stored = await fleet.runs.show(run_id)
    header = {name: _plain(value) for name, value in stored.header.items()}
    windows = [one async for one in fleet.runs.display(run_id)]
    return {
        "shown": replace(stored, header=header, fields=plain_log(stored.fields)),
        "result": stored.result(),
        "events": [one async for one in fleet.runs.events(run_id)],
        "followed": [one async for one in fleet.runs.events(run_id, follow=True)],
        "timeline": await fleet.runs.timeline(run_id),
        "tree": await fleet.runs.tree(run_id),
        "view": await fleet.runs.view(run_id),
        "display": windows[-1:],
        "waited": await fleet.runs.wait(run_id, timeout=20),
        "costs": [one async for one in fleet.cost_lines(run_id)],
        "steps": [one async for one in fleet.runs.steps(run_id)],
    }


async def listed(fleet: AsyncFleet, limit: int = 50, **which: Any) -> list[str]:
    """Return the runs of all pages of a list, in their order."""
    found, cursor = list[str](), None
    while True:
        page = await fleet.runs.page(limit=limit, cursor=cursor, **which)
        found += [one.run_id for one in page.runs]
        if (cursor := page.next) is None:
            return found


async def is_known(fleet: AsyncFleet, run_id: str) -> bool:
    """Return whether there is such a run, wherever it is."""
    with suppress(NotFoundError):
        return bool(await fleet.runs.show(run_id))
    return False


def _plain(value: str) -> str:
    with suppress(SerializationError):
        return plain(value)
    return value
