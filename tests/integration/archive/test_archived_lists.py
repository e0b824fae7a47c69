"""Lists of runs with archived ones among them: each run once, in order, whatever moves."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.runs.archives import archive, ended, ended_batch, files, in_redis, listed, move
from support.runs.stored_runs import Bench

from stepfleet.orchestrator.archive.segments import RunCopy
from stepfleet.orchestrator.store.archived import answer
from stepfleet.orchestrator.store.runs import archiving

CONDITIONS: tuple[dict[str, Any], ...] = (
    {},
    {"status": "completed"},
    {"status": "failed"},
    {"stop_reason": "error"},
    {"agent": "plain"},
    {"agent": "nobody"},
    {"tenant": "acme"},
    {"tenant": ""},
    {"parent": ""},
    {"error": "NO ANSWER"},
)


async def created(desk: Bench, run_id: str, at: int) -> None:
    """Have a run be created at a time (ms)."""
    keys = desk.opened.keys
    await desk.opened.connection.execute("HSET", keys.run(run_id), "created", at)
    for name in ("completed", "error"):
        of_list = f"{keys.tag(keys.shard_of(run_id))}runs:{name}"
        await desk.opened.connection.execute("ZADD", of_list, "XX", at, run_id)


async def test_archived_and_live_runs_are_listed_together(redis_url: str, tmp_path: Path) -> None:
    """OPS-05: with every condition, page by page, through thirty files and equal times."""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        for number in range(60):
            tenant = "acme" if number % 3 == 0 else None
            run_id = await ended(desk, well=number % 4 > 0, tenant=tenant)
            await created(desk, run_id, 1_700_000_000_000 + number * 7 % 20)
        whole = [await listed(fleet, **which) for which in CONDITIONS]
        assert [len(one) for one in whole[:3]] == [60, 45, 15]
        order = list(whole[0])
        for first in range(0, 60, 2):  # every file has neighbours of other files
            await only(desk, [order[first % 60], order[(first + 31) % 60]])
        assert len(await files(desk)) == 30
        left = await in_redis(desk, order)
        assert not left
        back = order[::5]
        assert await desk.opened.returning.restore(back) == len(back)
        for which, expected in zip(CONDITIONS, whole, strict=True):
            limit = 7 if which in CONDITIONS[:2] else 50
            assert await listed(fleet, limit, **which) == expected, which
        since = {"since": "2023-11-14T22:13:20.010+00:00"}
        assert 0 < len(await listed(fleet, 7, **since)) < 60


async def only(desk: Bench, run_ids: list[str]) -> None:
    """Move these runs to a file of their own."""
    assert await desk.opened.archiving.take("")
    done = await desk.opened.archiving._move(run_ids, None)
    await desk.opened.archiving.release("")
    assert (done.runs, done.files) == (len(run_ids), 1)


async def test_runs_are_listed_once_while_they_move(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: an archiver moves runs between the pages of a list, and within them."""
    monkeypatch.setattr(archiving, "RUNS", 5)
    async with archive(redis_url, tmp_path) as (desk, fleet):
        ids = [await ended(desk) for _ in range(60)]
        expected = await listed(fleet)
        assert set(expected) == set(ids)
        moving = asyncio.create_task(move(desk))
        looked = 0
        while not moving.done():
            assert await listed(fleet, 7) == expected
            looked += 1
        assert (await moving).runs == len(ids)
        assert looked > 1
        assert await listed(fleet, 7) == expected


async def test_a_batch_is_listed_by_its_rows(redis_url: str, tmp_path: Path) -> None:
    """OPS-05"""
    async with archive(redis_url, tmp_path) as (desk, fleet):
        batch = await ended_batch(desk, fleet, 12, failing=(3, 4))
        conditions: tuple[dict[str, Any], ...] = ({}, {"status": "failed"}, {"error": "no answer"})
        before = [await listed(fleet, 5, batch=batch.id, **which) for which in conditions]
        told, progress = await batch.failures(), await batch.progress()
        assert (await move(desk)).runs == 12
        after = [await listed(fleet, 5, batch=batch.id, **which) for which in conditions]
        assert after == before
        assert len(after[1]) == 2
        assert await fleet.runs.find("line-7", batch.id) == list(batch.run_ids())[7]
        assert await batch.failures() == told
        assert (await batch.progress()).done == progress.done


names = st.one_of(st.sampled_from(["slim", "status", "0", "1", "input:0"]), st.text(max_size=5))
values = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
hashes = st.dictionaries(names, values, min_size=1, max_size=6)
PARTS = ("", ":log", ":journal", ":outcomes", ":lost")


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    found=st.dictionaries(st.sampled_from(PARTS), hashes),
    events=st.lists(hashes, max_size=5),
    asked=st.lists(names, min_size=1, max_size=4),
)
async def test_an_archived_run_answers_as_redis_would(
    desk: Bench,
    found: dict[str, dict[str, str]],
    events: list[dict[str, str]],
    asked: list[str],
) -> None:
    """OPS-05: each command that reads a run, against a real Redis."""
    execute, run_id = desk.opened.connection.execute, "r"
    await execute("FLUSHALL")
    for part, fields in found.items():
        await execute("HSET", f"k{part}", *(one for pair in fields.items() for one in pair))
    for number, fields in enumerate(events, 1):
        flat = [one for pair in fields.items() for one in pair]
        await execute("XADD", "k:events", f"7-{number}", *flat)
    copy = RunCopy(run_id, found, [(f"7-{n}", one) for n, one in enumerate(events, 1)])
    assert RunCopy.of_line(copy.line()) == copy
    commands: list[tuple[Any, ...]] = [("HGETALL",), ("HKEYS",), ("HLEN",), ("HMGET", *asked)]
    commands += [("EXISTS",), *(("HGET", one) for one in asked)]
    commands += [("HSTRLEN", one) for one in asked]
    for part in PARTS:
        for word, *given_ in commands:
            expected = await execute(word, f"k{part}", *given_)
            assert answer(copy, part, word, *given_) == expected, (word, part)
    pages = [(), ("COUNT", 1), ("COUNT", 2), ("COUNT", 6)]
    for after, limits in itertools.product((0, 1, 3, 6), pages):
        first = f"(7-{after}" if after else "(0"
        reply = await execute("XRANGE", "k:events", first, "+", *limits)
        told = [(place, dict(fields)) for place, fields in reply]
        assert answer(copy, ":events", "XRANGE", first, "+", *limits) == told
