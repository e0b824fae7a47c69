"""One run on a real store with a scripted model, ready for its first step."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from support.deadlines import until
from support.runs.scripted_steps import Hands, Script
from support.runs.stored_runs import Bench, bench
from support.runs.waits import let_pass

from stepfleet.orchestrator import Agent

Opened = Callable[..., AbstractAsyncContextManager[tuple[Bench, Hands, str]]]


@asynccontextmanager
async def opened_run(
    url: str, *answers: Any, tools: tuple[Any, ...] = (), **config: Any
) -> AsyncIterator[tuple[Bench, Hands, str]]:
    """Yield the store, a worker's hands and the run's id; no lease there ends by itself."""
    agent = Agent("scripted", model=Script(answers), tools=tools, **config)
    async with bench(url, agent, lease=600, grace=60) as desk:
        yield desk, Hands(desk, agent), await desk.create()


async def finish_with_waits(hands: Hands, run_id: str, within: float = 60) -> None:
    """Do steps until the run has ended; where it waits before a retry, its wait is over at once."""

    async def ended() -> bool:
        stored = await hands.desk.stored(run_id)
        if not stored.state.status.is_terminal:
            await let_pass(hands.desk, run_id)
            await hands.step(run_id, stored.step)
        return stored.state.status.is_terminal

    await until(ended, within=within, what="the end of the run")


async def lease_runs_out(desk: Bench, run_id: str) -> None:
    """Move the lease into the past; that leases end by themselves is tested elsewhere."""
    keys, execute = desk.opened.keys, desk.opened.connection.execute
    ended = int((await desk.runs.now()).timestamp() * 1000) - 1
    await execute("HSET", keys.run(run_id), "lease", ended)
    await execute("ZADD", keys.due(keys.shard_of(run_id)), "XX", ended, run_id)
