"""Configurations that no run refers to are forgotten, and none that a run may still need."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
from support.deadlines import until
from support.runs.scripted_steps import Hands, Script, say
from support.runs.stored_runs import Bench, bench

from stepfleet.orchestrator import Agent
from stepfleet.orchestrator.store import configs, keys
from stepfleet.orchestrator.store.configs import (
    LEAST_SECONDS,
    NOTED_SECONDS,
    Configs,
)
from stepfleet.worker.runtime.background import keep_records

RETENTION = LEAST_SECONDS
NUMBERS = itertools.count()


@pytest.fixture
async def desk(redis_url: str) -> AsyncIterator[Bench]:
    async with bench(redis_url, agent(), retention=RETENTION) as opened:
        yield opened


def agent() -> Agent:
    """Return an agent whose configuration is new."""
    return Agent("plain", model=Script([say("done")]), instructions=f"No. {next(NUMBERS)}")


async def aged(desk: Bench, digest: str, seconds: float = RETENTION + 60) -> None:
    """Let a configuration have been submitted so long ago."""
    then = (await desk.runs.now()).timestamp() - seconds
    await desk.opened.connection.execute("ZADD", keys.USED, "XX", then, digest)


async def forget_stale(desk: Bench) -> int:
    return await desk.opened.configs.forget_stale(desk.opened.settings.retention)


async def forget_unused(desk: Bench) -> int:
    return await desk.opened.configs.forget_unused(desk.opened.settings.retention)


async def known(desk: Bench) -> set[str]:
    return set(await desk.opened.connection.execute("HKEYS", keys.AGENTS))


async def test_one_that_nobody_uses_is_forgotten_after_the_retention_time(desk: Bench) -> None:
    """The store does not grow with every change of an agent."""
    old, young = [await desk.opened.configs.save(agent().config) for _ in range(2)]
    await aged(desk, old)
    await aged(desk, young, RETENTION - 60)
    assert await forget_stale(desk) == 1
    assert await known(desk) == {young}
    assert await desk.opened.connection.execute("ZSCORE", keys.USED, old) is None


@pytest.mark.parametrize("state", ["queued", "in_progress", "paused", "completed"])
async def test_a_run_keeps_its_configuration_for_as_long_as_it_exists(
    desk: Bench, state: str
) -> None:
    """However long ago it was submitted, and whatever waits for it."""
    run_id = await desk.create()
    if state == "in_progress":
        await desk.claim(run_id)
    if state == "paused":
        await desk.control.pause(run_id)
    if state == "completed":
        await Hands(desk, desk.agent).finish(run_id)
    stored = await desk.stored(run_id)
    assert stored.header["status"] == state
    await aged(desk, stored.header["config"])
    assert await forget_stale(desk) == 0
    assert await Configs(desk.opened.connection).load(stored.header["config"])
    await desk.opened.connection.execute("DEL", desk.opened.keys.run(run_id))
    assert await forget_stale(desk) == 0, "that a run had it counts as a use"
    await aged(desk, stored.header["config"])
    assert await forget_stale(desk) == 1


async def test_runs_of_any_number_and_name_are_found(
    desk: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of keys are read in pages, and an id may end as a key of a run does."""
    monkeypatch.setattr(configs, "PAGE", 3)
    digests = [await desk.create() and desk.agent.config.digest for _ in range(20)]
    desk.agent = agent()
    run_id = await desk.create()
    header = desk.opened.keys.run(run_id)
    await desk.opened.connection.execute("RENAME", header, f"{header}:log")
    for digest in {*digests, desk.agent.config.digest}:
        await aged(desk, digest)
    assert await forget_stale(desk) == 0


async def test_what_a_worker_has_announced_stays(desk: Bench) -> None:
    """Clients find it by its name."""
    announced = agent()
    await desk.opened.configs.announce(announced.config)
    await aged(desk, announced.config.digest)
    assert await forget_stale(desk) == 0
    assert (await desk.opened.configs.named("plain")).digest == announced.config.digest


async def test_one_of_an_older_version_counts_from_the_first_look(desk: Bench) -> None:
    """Nobody has noted when it was used."""
    digest = await desk.opened.configs.save(agent().config)
    await desk.opened.connection.execute("DEL", keys.USED)
    assert await forget_stale(desk) == 0
    await aged(desk, digest)
    assert await forget_stale(desk) == 1


async def test_who_submits_again_after_long_writes_it_again(
    desk: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process has saved once may be forgotten when it needs it next."""
    config = agent().config
    await desk.opened.configs.save(config)
    await aged(desk, config.digest)
    assert await forget_stale(desk) == 1
    await desk.opened.configs.save(config)
    assert await known(desk) == set(), "it was saved a moment ago"
    monkeypatch.setattr("stepfleet.orchestrator.store.configs.NOTED_SECONDS", -1.0)
    await desk.opened.configs.save(config)
    assert await known(desk) == {config.digest}
    assert NOTED_SECONDS * 2 < LEAST_SECONDS


@pytest.mark.parametrize("before", ["unused", "HDEL", "ZSCORE"])
async def test_one_that_is_used_at_the_same_time_is_kept(
    desk: Bench, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Whichever step of forgetting a submission comes before."""
    config = agent().config
    await desk.opened.configs.save(config)
    await aged(desk, config.digest)
    connection, rival = desk.opened.connection, Configs(desk.opened.connection)
    execute = connection.execute

    async def interrupted(*command: object) -> object:
        name = "unused" if command[0] in ("EVAL", "EVALSHA") else command[0]
        if name == before:
            monkeypatch.setattr(connection, "execute", execute)
            await rival.save(config)
        return await execute(*command)

    monkeypatch.setattr(connection, "execute", interrupted)
    assert await forget_stale(desk) == 0
    assert await known(desk) == {config.digest}


async def test_one_worker_of_a_fleet_looks(desk: Bench) -> None:
    """The others find that it was done."""
    for _ in range(2):
        await aged(desk, await desk.opened.configs.save(agent().config))
    assert await forget_unused(desk) == 2
    await aged(desk, await desk.opened.configs.save(agent().config))
    assert await forget_unused(desk) == 0
    await desk.opened.connection.execute("DEL", keys.SWEPT)
    assert await forget_unused(desk) == 1


async def test_a_worker_tidies_up_beside_its_steps(
    desk: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepfleet.worker.runtime.background.FIRST_SECONDS", 0.0)
    await aged(desk, await desk.opened.configs.save(agent().config))
    task = asyncio.create_task(keep_records(desk.opened))

    async def is_gone() -> bool:
        return not await known(desk)

    try:
        await until(is_gone, within=30)
    finally:
        task.cancel()
