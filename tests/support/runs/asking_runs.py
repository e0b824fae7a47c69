"""Runs whose calls wait for people, done by a worker in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from support.deadlines import until
from support.runs.scripted_steps import Script, call

from stepfleet.orchestrator import Agent, Ask, AsyncFleet, ask_person, tool
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker


@tool(approval=True)
def pay(usd: int) -> str:
    """Pay somebody."""
    return f"paid {usd}"


def clerk(*script: Any, **config: Any) -> Agent:
    given = {"tools": [pay, ask_person], "time_limit": None, "parallel_tool_execution": True}
    return Agent("clerk", model=Script(script), **{**given, **config})


def asks(usd: int) -> Any:
    return call(("pay", {"usd": usd}))


@asynccontextmanager
async def worked_on(redis_url: str, agent: Agent, *ids: str) -> AsyncIterator[None]:
    """Do the steps of these runs meanwhile."""
    async with InlineWorker(load_settings(redis_url=redis_url), [agent]) as worker:
        work = asyncio.create_task(worker.finish(*ids))
        try:
            yield
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work


async def waiting(fleet: AsyncFleet, count: int, **which: Any) -> list[Ask]:
    """Return the calls that wait, as soon as there are so many."""
    found: list[Ask] = []

    async def all_there() -> bool:
        found[:] = [one async for one in fleet.approvals.all(**which)]
        return len(found) == count

    await until(all_there, what=f"{count} calls that wait")
    return found
