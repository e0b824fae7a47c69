"""What calls cost in the tier in which their provider has served them: everywhere the same."""

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from stepfleet.orchestrator import Agent, AsyncFleet
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, Usage
from stepfleet.worker.testing.server import ModelServer

TOKENS = Usage(15, 5)
USUAL = Decimal("0.002")
TIERS = {"flex": 0.5, "priority": 2, "batch": 0.25}
PRICES = {"any": {"m": {"input": 100, "output": 100, "tiers": TIERS}}}
SHARES = {None: 1, "flex": 0.5, "priority": 2, "batch": 0.25, "unheard_of": 1}
LANES = {None: "standard", "unheard_of": "other"}
VARIABLES = {
    "openai": ("OPENAI_BASE_URL", "OPENAI_API_KEY", ""),
    "openai-responses": ("OPENAI_BASE_URL", "OPENAI_API_KEY", ""),
    "anthropic": ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "/v1"),
    "google": ("GEMINI_BASE_URL", "GEMINI_API_KEY", "/v1"),
    "bedrock": ("AWS_ENDPOINT_URL_BEDROCK_RUNTIME", "AWS_BEARER_TOKEN_BEDROCK", "/v1"),
}


def rules(request: RequestRecord) -> Reply:
    """Serve in the tier that is asked for by the question."""
    asked = request.question.strip()
    return Reply("done", usage=TOKENS, service_tier=None if asked == "None" else asked)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModelServer]:
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps(PRICES))
    monkeypatch.setenv("STEPFLEET_PRICING_CONFIG", str(prices))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with ModelServer(rules) as made:
        for url, key, extra in VARIABLES.values():
            monkeypatch.setenv(url, made.url.removesuffix(extra))
            monkeypatch.setenv(key, "none")
        yield made


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("provider", VARIABLES)
async def test_result_ledger_and_budget_agree_on_the_price_of_a_tier(
    redis_url: str,
    server: ModelServer,
    provider: str,
    streams: bool,
) -> None:
    """LANE-01: five protocols, flex, priority, batch, unknown tier."""
    agent = Agent("plain", model=f"{provider}:m", settings={"stream": streams})
    settings = load_settings(redis_url=redis_url, limits={"tenant:acme": {"usd": 1}})
    async with AsyncFleet(settings=settings) as fleet, InlineWorker(settings, [agent]) as worker:
        runs = {}
        for tier in SHARES:
            runs[tier] = await fleet.submit(agent, str(tier), tenant="acme")
            await worker.finish(runs[tier])
        results = {tier: await fleet.runs.result(run_id) for tier, run_id in runs.items()}
        costs = await fleet.costs("lane")
        use = {one.name: one for one in await fleet.limits.use()}["tenant:acme"]
    usual = float(USUAL)
    assert {tier: one.cost_usd for tier, one in results.items()} == {
        tier: pytest.approx(usual * share) for tier, share in SHARES.items()
    }
    assert {tier: one.steps[0].service_tier for tier, one in results.items()} == {
        tier: tier or "" for tier in SHARES
    }
    assert {row.group["lane"]: float(row.usd) for row in costs.rows} == {
        LANES.get(tier, tier): pytest.approx(usual * share) for tier, share in SHARES.items()
    }
    assert {one.field: float(one.spent) for one in use.budgets} == {
        "usd": pytest.approx(usual * sum(SHARES.values()))
    }
