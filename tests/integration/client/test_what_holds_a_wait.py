"""What the error of a wait names: limits and services that hold its own runs, and no others."""

import asyncio
from collections.abc import Iterator

import orjson
import pytest
from support.deadlines import until

from stepfleet.orchestrator import Agent, AsyncFleet, tool
from stepfleet.orchestrator.client.batch import AsyncBatch
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store import keys
from stepfleet.worker.runtime.inline import InlineWorker
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer


@tool(approval=True)
def pay(usd: int) -> str:
    """Pay somebody."""
    return f"paid {usd}"


BUSY = Agent("busy", model="openai:refused")
OTHER = Agent("other", model="openai:fine", tools=[pay])


def rules(request: RequestRecord) -> Reply | Fault:
    """Refuse calls of one model for a long time; the other one asks to pay."""
    if request.model == "refused":
        return Fault("rate_limited", retry_after=50)
    return Reply(tool_calls=(ToolCallReply("pay", {"usd": 1}),))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with ModelServer(rules) as made:
        monkeypatch.setenv("OPENAI_BASE_URL", made.url)
        yield made


async def why(batch: AsyncBatch) -> str:
    with pytest.raises(TimeoutError) as caught:
        await batch.wait(timeout=0.05)
    return str(caught.value)


async def reported(fleet: AsyncFleet, *agents: str) -> None:
    """Report a worker with these agents."""
    store = await store_of(fleet)
    seen = (await store.connection.now()).timestamp()
    report = {"seen": seen, "slots": 2, "agents": agents, "queues": [store.settings.queue]}
    key = store.keys.of(keys.WORKERS)
    await store.connection.execute("HSET", key, "elsewhere:5", orjson.dumps(report).decode())


@pytest.mark.usefixtures("server")
async def test_a_wait_names_the_pause_of_its_own_model_alone(redis_url: str) -> None:
    settings = load_settings(redis_url=redis_url)
    agents = [BUSY, OTHER]
    async with AsyncFleet(settings=settings) as fleet, InlineWorker(settings, agents) as worker:
        refused = await fleet.submit_batch([{"input": str(n)} for n in range(3)], BUSY)
        paying = await fleet.submit_batch([{"input": "x"}], OTHER)
        await reported(fleet, BUSY.name, OTHER.name)
        work = asyncio.create_task(worker.finish(*refused.run_ids(), *paying.run_ids()))
        try:

            async def are_named() -> bool:
                texts = [await why(batch) for batch in (refused, paying)]
                return "of openai:refused" in texts[0] and "approvals" in texts[1]

            await until(are_named, within=60, what="both waits name what holds them")
            assert "openai:refused" not in await why(paying)
            assert "approvals" not in await why(refused)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
