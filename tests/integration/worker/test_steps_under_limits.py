"""Steps under limits of the fleet, in this process: what is spent, who waits, which model cools."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.deadlines import until
from support.runs.heavy_calls import render

from stepfleet.orchestrator import Agent, AsyncFleet, LimitUse
from stepfleet.orchestrator.models.failures import refusal
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply, ToolCallReply, Usage
from stepfleet.worker.testing.server import ModelServer

TOKENS = Usage(15, 5)
CALL = 0.002
"""What each call costs, at the prices of these tests."""
PRICES = {"openai": {name: {"input": 100, "output": 100} for name in ("m", "first", "second")}}


def rules(request: RequestRecord) -> Reply:
    """One tool on a queue of its own where the question is for it; then the answer."""
    if request.turn == 1 and "heavy" in request.question:
        return Reply(tool_calls=(ToolCallReply("render", {"what": "it"}),), usage=TOKENS)
    return Reply("done", latency=0.05, usage=TOKENS)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModelServer]:
    """A model server, with prices."""
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps(PRICES))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("STEPFLEET_PRICING_CONFIG", str(prices))
    with ModelServer(rules) as made:
        monkeypatch.setenv("OPENAI_BASE_URL", made.url)
        yield made


@asynccontextmanager
async def working(
    url: str, agent: Agent, **limits: Any
) -> AsyncIterator[tuple[AsyncFleet, InlineWorker]]:
    settings = load_settings(redis_url=url, limits=limits)
    async with AsyncFleet(settings=settings) as fleet, InlineWorker(settings, [agent]) as worker:
        yield fleet, worker


async def use_of(fleet: AsyncFleet, name: str) -> LimitUse:
    return {one.name: one for one in await fleet.limits.use()}.get(name, LimitUse(name=name))


async def test_a_step_that_waits_for_its_tools_spends_its_call_once(
    redis_url: str, server: ModelServer
) -> None:
    """Its tokens and their price when it begins to wait, and nothing when it goes on."""
    agent = Agent("heavy", model="openai:m", tools=[render])
    limit = {"usd": 1, "calls": 100, "tokens_per_minute": 60, "burst": 300}
    async with working(redis_url, agent, **{"tenant:acme": limit}) as (fleet, worker):
        run_id = await fleet.submit(agent, "heavy", tenant="acme")
        await worker.finish(run_id)
        assert (await fleet.runs.result(run_id)).output == "done"
        use = await use_of(fleet, "tenant:acme")
    spent = {one.field: float(one.spent) for one in use.budgets}
    assert spent == {"usd": pytest.approx(2 * CALL), "calls": 2}
    assert len(server.requests) == 2
    assert 259 < use.levels["tokens_per_minute"] < 270, "40 of 300 are taken"
    assert not any(one.reserved for one in use.budgets)


async def test_runs_in_this_process_keep_the_limits_of_the_fleet(
    redis_url: str, server: ModelServer
) -> None:
    """DIST-16: what `finish` is given waits for its turn, and all of it ends."""
    agent = Agent("plain", model="openai:m")
    limits = {"openai:m": {"in_flight": 2, "requests_per_minute": 1200, "burst": 0.1}}
    async with working(redis_url, agent, **limits) as (fleet, worker):
        runs = [await fleet.submit(agent, f"question {n}") for n in range(12)]
        await worker.finish(*runs)
        results = [await fleet.runs.result(run_id) for run_id in runs]
        use = await use_of(fleet, "openai:m")
    assert [one.output for one in results] == ["done"] * 12
    assert server.log.most_in_flight <= 2
    sent = sorted(one.received for one in server.requests)
    assert sent[-1] - sent[0] > 9 / 20, "20 a second, two at once at first"
    assert (use.in_flight, use.waiting) == (0, 0)


async def refused(server: ModelServer) -> None:
    async def has_refused() -> bool:
        return any(one.outcome == "rate_limited" for one in server.requests)

    await until(has_refused, within=20, what="the refusal")


def called(server: ModelServer) -> list[tuple[str, str | None]]:
    return [(one.model, one.outcome) for one in server.requests]


LISTED: dict[str, Any] = {"model": ["openai:first", "openai:second"], "model_attempts": 5}


async def test_the_step_of_a_refused_call_waits_and_no_other(
    redis_url: str, server: ModelServer
) -> None:
    """ERR-22: it calls no other model of its list, and the next run does not wait with it."""
    agent = Agent("listed", **LISTED)
    server.fail(Fault("rate_limited", retry_after=3.0), key="one", turn=1)
    async with working(redis_url, agent) as (fleet, worker):
        runs = [await fleet.submit(agent, "one")]
        work = asyncio.create_task(worker.finish(*runs))
        await refused(server)
        await worker.finish(await fleet.submit(agent, "two"))
        assert not work.done()
        assert not (await use_of(fleet, "openai:first")).cool_seconds
        await work
    refusal, other, answered = server.requests
    assert called(server) == [("first", "rate_limited"), *[("first", "replied")] * 2]
    assert other.received - refusal.received < 3
    assert answered.received - refusal.received > 2.95


async def test_the_second_model_refuses_and_the_first_is_called(
    redis_url: str, server: ModelServer
) -> None:
    agent = Agent("listed", **LISTED)
    server.fail(Fault("server_error"), key="one", turn=1)
    server.fail(Fault("rate_limited", retry_after=1.0), key="one", turn=1, attempt=2)
    async with working(redis_url, agent) as (fleet, worker):
        run_id = await fleet.submit(agent, "one")
        work = asyncio.create_task(worker.finish(run_id))
        await refused(server)
        assert (await use_of(fleet, "openai:first")).limit is None
        await work
    assert called(server) == [
        ("first", "server_error"),
        ("second", "rate_limited"),
        ("first", "replied"),
    ]


@pytest.mark.parametrize("wish", [1e20, 1e305, -5.0])
async def test_a_wish_of_a_provider_that_is_out_of_all_bounds_fails_no_run(
    redis_url: str, server: ModelServer, wish: float
) -> None:
    """ERR-22: such a `retry-after` once hung a step, or failed its run; others went with it."""
    agent = Agent("plain", model="openai:m", model_attempts=1)
    limit: dict[str, Any] = {"openai:m": {"in_flight": 5}}
    async with working(redis_url, agent, **limit) as (fleet, worker):
        server.fail(Fault("rate_limited", retry_after=wish), key="huge", turn=1)
        run_id = await fleet.submit(agent, "huge")
        work = asyncio.create_task(worker.finish(run_id))
        await refused(server)
        await worker.finish(await fleet.submit(agent, "beside"))
        if wish >= 0:
            assert not work.done(), "it waits for an hour at most"
            await fleet.runs.cancel(run_id)
        await work
        result = await fleet.runs.result(run_id)
    assert result.status == ("cancelled" if wish >= 0 else "completed")
    assert len(server.requests) == (2 if wish >= 0 else 3), "no call was made twice"


class Flex:
    """A model whose cheap tier has no capacity for the first call."""

    def __init__(self) -> None:
        self.calls = 0

    async def generate(self, request: ModelRequest) -> LLMResponse:
        """Refuse once as flex processing does, then answer."""
        self.calls += 1
        if self.calls == 1:
            words = {"message": "Resource unavailable", "code": "resource_unavailable"}
            body = orjson.dumps({"error": words})
            raise refusal(429, {}, body, host="api.test", key=None, now=datetime.now(UTC))
        return LLMResponse(content="done")

    def stream(self, request: ModelRequest) -> AsyncIterator[str]:
        """Not used here."""
        raise NotImplementedError


async def test_a_tier_without_capacity_teaches_no_limit_and_its_step_waits(redis_url: str) -> None:
    """LANE-03: it opens no circuit and cools nothing; it costs no attempt."""
    model = Flex()
    agent = Agent("flex", model=model, model_attempts=1)
    async with working(redis_url, agent) as (fleet, worker):
        run_id = await fleet.submit(agent, "one")
        await worker.finish(run_id)
        assert (await fleet.runs.result(run_id)).output == "done"
        assert await fleet.limits.use() == []
    assert model.calls == 2
