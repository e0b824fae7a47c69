"""Lists of runs: right after every transition, read page by page, never by scanning all runs."""

import random
from collections import Counter
from typing import Any

import pytest
from support.runs.stored_runs import Bench, answered, failed

from stepfleet.orchestrator import AsyncFleet, ConfigurationError, Lifecycle, RunPage
from stepfleet.orchestrator.client.runs import LONGEST_CONDITION
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run.facts import end_state
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.runs.listing import LISTS

BENCH: dict[str, Any] = {"lease": 600.0, "grace": 60}
RUNS = 3_000


async def lists_of(desk: Bench, run_id: str) -> list[str]:
    """Return the lists in which a run is."""
    keys, execute = desk.opened.keys, desk.opened.connection.execute
    tag = keys.tag(keys.shard_of(run_id))
    return [name for name in LISTS if await execute("ZSCORE", f"{tag}runs:{name}", run_id)]


async def put(desk: Bench, run_id: str, name: str, created: int, **fields: Any) -> None:
    """Store a run as a list reads it, without the rest."""
    keys, execute = desk.opened.keys, desk.opened.connection.execute_all
    ended = name in set(StopReason)
    status = end_state(StopReason(name)).value if ended else name
    header = {"status": status, "stop_reason": name if ended else "", "created": created, "step": 1}
    header |= {"agent": "a", "updated": created, "slim": "{}", **fields}
    flat = [part for pair in header.items() for part in pair]
    listed = f"{keys.tag(keys.shard_of(run_id))}runs:{name}"
    await execute(("HSET", keys.run(run_id), *flat), ("ZADD", listed, created, run_id))


async def pages(fleet: AsyncFleet, **which: Any) -> list[RunPage]:
    """Return all pages of a list."""
    found = [await fleet.runs.page(**which)]
    while found[-1].next:
        found.append(await fleet.runs.page(cursor=found[-1].next, **which))
    return found


def ids(found: list[RunPage]) -> list[str]:
    """Return the runs of pages."""
    return [run.run_id for page in found for run in page.runs]


async def test_a_run_is_in_exactly_one_list_whatever_happens_to_it(
    desk: Bench, fleet: AsyncFleet
) -> None:
    run_id = await desk.create(batch="")
    seen = [await lists_of(desk, run_id)]
    for request in (fleet.runs.pause, fleet.runs.resume):
        await request(run_id)
        seen.append(await lists_of(desk, run_id))
    claim = await desk.claim(run_id)
    seen.append(await lists_of(desk, run_id))
    await desk.commit(claim, failed(claim))
    seen.append(await lists_of(desk, run_id))
    for again in (fleet.runs.retry, fleet.runs.cancel):
        await again(run_id)
        seen.append(await lists_of(desk, run_id))
    fork = await fleet.history.fork(run_id)
    assert await lists_of(desk, fork) == ["queued"]
    assert await fleet.runs.purge() == 1
    assert seen == [
        *(["queued"], ["paused"], ["queued"], ["in_progress"]),
        *(["error"], ["in_progress"], ["user_requested"]),
    ]
    assert await lists_of(desk, run_id) == []
    assert ids(await pages(fleet)) == [fork]


async def test_a_page_shows_what_a_run_has_done(desk: Bench, fleet: AsyncFleet) -> None:
    good, bad = await desk.create(batch="", tenant="acme"), await desk.create(batch="")
    claims = [await desk.claim(good), await desk.claim(bad)]
    await desk.commit(claims[0], answered(claims[0]))
    await desk.commit(claims[1], failed(claims[1]))
    (run,) = (await fleet.runs.page(status="completed", tenant="acme")).runs
    shown = (run.run_id, run.agent, run.steps, run.tokens, run.cost_usd, run.active_seconds)
    assert shown == (good, "plain", 1, 15, 0.25, 0.5)
    assert run.ended is not None
    assert run.created <= run.ended
    (run,) = (await fleet.runs.page(error="NO ANSWER", since=run.created)).runs
    assert (run.run_id, run.status, run.stop_reason) == (bad, Lifecycle.FAILED, StopReason.ERROR)
    assert "no answer" in (run.error or "")
    assert ids(await pages(fleet, tenant="")) == [bad]


async def test_a_part_of_an_error_is_found_whatever_its_case(
    desk: Bench, fleet: AsyncFleet
) -> None:
    await put(desk, "r1", "error", 1_000, error="Boom: no route to Évry")
    for part in ("boom", "Boom", "BOOM: No", "Évry"):
        assert ids(await pages(fleet, error=part)) == ["r1"]


async def test_thousands_of_runs_are_read_once_each_and_the_newest_first(
    desk: Bench, fleet: AsyncFleet
) -> None:
    """Many are of one time, some lists are long, and some conditions fit few runs."""
    draw = random.Random(7)
    names = ["queued", "completed", "error", "time_limit"]
    runs: dict[str, tuple[int, str]] = {}
    for n in range(RUNS):
        run_id = f"{draw.getrandbits(64):016x}"
        runs[run_id] = draw.choice([1_000, *range(2_000, 2_400)]), names[n % 4]
        agent = "rare" if n in {5, 1_500, RUNS - 3} else "a"
        await put(desk, run_id, runs[run_id][1], runs[run_id][0], agent=agent)
    order = sorted(runs, key=lambda one: (runs[one][0], one), reverse=True)
    found = await pages(fleet, limit=200)
    assert ids(found) == order
    assert all(len(page.runs) == 200 for page in found[:-1])
    wanted = [one for one in order if runs[one][1] == "error"]
    assert ids(await pages(fleet, limit=70, status="failed")) == wanted
    assert ids(
        await pages(fleet, limit=500, stop_reason="error", since="1970-01-01T00:00:02.2")
    ) == [one for one in wanted if runs[one][0] >= 2_200]
    assert ids(await pages(fleet, status="queued", stop_reason="error")) == []
    assert len(ids(await pages(fleet, agent="rare", limit=2))) == 3


async def test_a_page_looks_at_a_bounded_number_of_runs_and_says_where_to_go_on(
    desk: Bench, fleet: AsyncFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepfleet.orchestrator.store.runs.listing.LOOKS", 9)
    for n in range(2_000):
        await put(desk, f"r{n:04}", "completed", 1_000 + n, agent="rare" if n == 3 else "a")
    found = await pages(fleet, agent="rare", limit=3)
    assert ids(found) == ["r0003"]
    assert len(found) > 1
    assert max(page.looked_at for page in found) <= 8 * 9 * desk.opened.keys.shards


async def test_a_batch_is_listed_by_its_rows_also_without_lists(
    desk: Bench, fleet: AsyncFleet
) -> None:
    """So are the runs of a batch that an older version has made."""
    batch = await fleet.submit_batch(
        [{"id": str(n), "input": "x"} for n in range(30)], agent=desk.agent
    )
    for row in (4, 20):
        claim = await desk.claim(run_id_of(batch.id, row))
        await desk.commit(claim, failed(claim))
    for key in await desk.opened.connection.execute("KEYS", "sf:*:runs:*"):
        await desk.opened.connection.execute("DEL", key)
    found = await pages(fleet, batch=batch.id, status="failed", limit=1)
    assert ids(found) == [run_id_of(batch.id, 20), run_id_of(batch.id, 4)]
    assert len(ids(await pages(fleet, batch=batch.id, limit=7))) == 30
    assert ids(await pages(fleet, batch=batch.id, agent="other")) == []


async def test_runs_that_are_gone_or_moved_leave_the_lists(desk: Bench, fleet: AsyncFleet) -> None:
    """They expire, or an older worker ends them, which keeps no lists."""
    for n in range(1_000):
        await put(desk, f"r{n:04}", "completed", 1_000 + n)
    for n in range(900):
        await desk.opened.connection.execute("DEL", desk.opened.keys.run(f"r{n:04}"))
    fields = ("status", "failed", "stop_reason", "error")
    await desk.opened.connection.execute("HSET", desk.opened.keys.run("r0950"), *fields)
    assert len(ids(await pages(fleet))) == 99
    lists = desk.opened.lists
    wrong = sum([await lists.tidy_shard(shard) for shard in range(desk.opened.keys.shards)])
    assert wrong == 901
    assert await lists_of(desk, "r0950") == ["error"]
    kept = [await lists_of(desk, f"r{n:04}") for n in range(1_000)]
    assert Counter(map(len, kept)) == {0: 900, 1: 100}
    assert await lists.look() == 0
    assert await lists.look() == 0


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"status": "done"}, "status"),
        ({"stop_reason": "\udcff"}, "stop_reason"),
        ({"since": "yesterday"}, "since"),
        ({"limit": 0}, "limit"),
        ({"limit": 100_000}, "limit"),
        ({"cursor": "x"}, "cursor"),
        ({"cursor": "é" * 10_000}, "cursor"),
        ({"error": "e" * (LONGEST_CONDITION + 1)}, "error"),
        ({"agent": "\udcff"}, "agent"),
        ({"batch": "\udcff"}, "id"),
        ({"batch": "no such"}, "batch"),
    ],
)
async def test_what_cannot_be_meant_is_refused(
    fleet: AsyncFleet, wrong: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigurationError, match=field):
        await fleet.runs.page(**wrong)
