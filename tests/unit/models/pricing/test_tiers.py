"""Prices by the tier in which a provider says it has served a call."""

import json
import logging
from pathlib import Path

import pytest

from stepfleet.orchestrator import Agent, ConfigurationError, UsageStats
from stepfleet.orchestrator.models.pricing import Price, Prices, load_prices, stated_cost
from stepfleet.orchestrator.models.pricing.prices import LongPrompt, parse_prices, tier_of

MILLION = UsageStats(prompt_tokens=1_000_000, completion_tokens=1_000_000)
FILE = {
    "openai": {
        "tiers": {"flex": 0.5, "priority": 2},
        "m": {"input": 2, "output": 8},
        "dear": {"input": 2, "output": 8, "tiers": {"priority": 1.75}},
        "apart": {"input": 2, "output": 8, "tiers": {"batch": {"input": 1, "output": 3}}},
    },
    "default": {"input": 5, "output": 15},
}


@pytest.mark.parametrize(
    ("stated", "tier"),
    [
        (("flex",), "flex"),
        (("PRIORITY",), "priority"),
        (("ON_DEMAND_FLEX",), "flex"),
        (("SERVICE_TIER_PRIORITY",), "priority"),
        (("standard", "fast"), "fast"),
        (("default",), ""),
        (("auto",), ""),
        (("on_demand",), ""),
        (("ON_DEMAND",), ""),
        (("on-demand",), ""),
        ((None, 3, {}), ""),
        (("x" * 1_000_000,), "other"),
        (("a b\n",), "other"),
    ],
)
def test_a_tier_is_a_short_word_and_the_usual_one_is_none(
    stated: tuple[object, ...], tier: str
) -> None:
    """LANE-01"""
    assert tier_of(*stated) == tier


@pytest.mark.parametrize(
    ("model", "tier", "cost"),
    [
        ("m", "", 10),
        ("m", "flex", 5),
        ("m", "priority", 20),
        ("dear", "flex", 5),
        ("dear", "priority", 17.5),
        ("apart", "batch", 4),
        ("openai:m-2026-01-01", "flex", 5),
    ],
)
def test_a_file_has_multipliers_by_provider_model_and_tier(
    model: str, tier: str, cost: float
) -> None:
    """LANE-01"""
    assert parse_prices(FILE, "mine").cost_of(model, MILLION, tier) == pytest.approx(cost)


def test_an_unknown_tier_costs_as_the_standard_one_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """LANE-01"""
    prices = parse_prices(FILE, "mine")
    with caplog.at_level(logging.WARNING):
        assert [prices.cost_of("m", MILLION, "turbo") for _ in range(3)] == [10, 10, 10]
    (said,) = caplog.messages
    assert "no price for tier 'turbo' of model 'm' in mine" in said
    assert '"tiers": {"turbo": MULTIPLIER}' in said


def test_servers_that_name_ever_new_tiers_and_models_fill_no_memory() -> None:
    prices = Prices(models={"m": Price(input=1, output=1)})
    logging.disable()
    try:
        for number in range(3000):
            prices.cost_of(f"m-{number}", MILLION, f"t{number}")
            prices.cost_of(f"unknown{number}", MILLION)
    finally:
        logging.disable(logging.NOTSET)
    assert len(prices._found) <= 1024
    assert len(prices._warned) <= 1024


def test_a_file_without_tiers_has_the_shipped_multipliers_of_its_models(tmp_path: Path) -> None:
    """LANE-01: who has negotiated a price still gets half of it in flex."""
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"openai": {"gpt-5": {"input": 1, "output": 8}}}))
    prices = load_prices(path)
    assert prices.cost_of("gpt-5", MILLION) == pytest.approx(9)
    assert prices.cost_of("gpt-5", MILLION, "flex", "openai") == pytest.approx(4.5)
    assert prices.cost_of("gpt-5", MILLION, "batch", "openai") == pytest.approx(4.5)
    assert prices.cost_of("gpt-5", MILLION, "priority", "openai") == pytest.approx(18)


@pytest.mark.parametrize(
    ("address", "model", "tier", "share"),
    [
        ("openai", "gpt-5", "flex", 0.5),
        ("openai", "gpt-4.1", "priority", 1.75),
        ("openai-responses", "gpt-5-mini", "priority", 1.8),
        ("anthropic", "claude-sonnet-4-5", "batch", 0.5),
        ("google", "gemini-2.5-flash", "flex", 0.5),
        ("bedrock", "us.anthropic.claude-haiku-4-5-20251001-v1:0", "flex", 0.5),
        ("bedrock", "us.anthropic.claude-haiku-4-5-20251001-v1:0", "priority", 1.75),
        ("groq", "llama-3.3-70b-versatile", "flex", 1.0),
    ],
)
def test_shipped_tiers_are_those_of_the_providers_lists(
    address: str, model: str, tier: str, share: float
) -> None:
    """LANE-01"""
    prices = load_prices(Path(__file__).parent / "no file")
    usual = prices.cost_of(model, MILLION, "", address)
    assert prices.cost_of(model, MILLION, tier, address) == pytest.approx(share * usual, rel=0.01)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"p": {"tiers": {"flex": "half"}, "m": {"input": 1, "output": 1}}}, r"p\.tiers: .*flex"),
        ({"p": {"tiers": {"flex": -1}}}, r"p\.tiers: .*flex"),
        ({"p": {"tiers": 0.5}}, r"p\.tiers"),
        ({"p": {"m": {"input": 1, "output": 1, "tiers": {"flex": "half"}}}}, r"p\.m: .*flex"),
        ({"p": {"m": {"input": 1, "output": 1, "long_prompt": {"input": 2}}}}, "long_prompt"),
    ],
)
def test_a_wrong_tier_is_reported_with_its_place(data: object, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        parse_prices(data, "mine")


def test_an_agents_own_price_has_tiers_as_well() -> None:
    """LANE-01"""
    one = {"input": 2, "output": 8, "tiers": {"flex": 0.5}}
    for pricing in (one, {"m": one}):
        known = Agent("a", model="openai:m", pricing=pricing).config.pricing
        assert stated_cost(known, ("m",), MILLION, "flex") == 5
        assert stated_cost(known, ("m",), MILLION, "priority") == stated_cost(
            known, ("m",), MILLION
        )


def test_all_tokens_of_a_long_prompt_cost_its_own_price() -> None:
    beyond = LongPrompt(above=200_000, input=4, output=20)
    price = Price(input=2, output=10, long_prompt=beyond, tiers={"flex": 0.5})
    short = UsageStats(prompt_tokens=200_000, completion_tokens=100_000)
    longer = UsageStats(prompt_tokens=200_001, completion_tokens=100_000)
    assert price.cost(short) == pytest.approx(1.4)
    assert price.cost(longer) == pytest.approx(2.8, rel=1e-4)
    assert price.cost(longer, "flex") == pytest.approx(1.4, rel=1e-4)
