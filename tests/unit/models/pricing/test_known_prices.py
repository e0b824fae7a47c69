"""Prices of the library that workers have beside the shipped table."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.loaded_modules import loaded_by

from stepfleet.orchestrator import UsageStats
from stepfleet.orchestrator.models.pricing import Price, load_prices, loading
from stepfleet.orchestrator.models.pricing.loading import shipped_prices

SOLD = [
    ("openai-responses", "gpt-5.2-2025-12-11", 1.75, 14.0),
    ("openai", "gpt-5.6-sol", 4.0, 20.0),
    ("google", "gemini-3-flash-preview", 0.5, 3.0),
    ("openrouter", "anthropic/claude-4.6-sonnet-20260217", 3.0, 15.0),
    ("https://openrouter.ai/api/v1", "anthropic/claude-sonnet-4.5", 3.0, 15.0),
    ("litellm", "anthropic/claude-sonnet-4.5", 3.0, 15.0),
    ("groq", "llama-3.3-70b-versatile", 0.59, 0.79),
    ("https://api.groq.com/openai/v1", "llama-3.3-70b-versatile", 0.59, 0.79),
    ("mistral", "mistral-medium-latest", 1.5, 7.5),
    ("https://api.z.ai/api/paas/v4", "glm-4.6v", 0.3, 0.9),
    ("bedrock", "us.anthropic.claude-haiku-4-5-20251001-v1:0", 1.1, 5.5),
    ("openai", "claude-haiku-4-5-20251001", 1.0, 5.0),
]


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a client's installation."""
    for name in [one for one in sys.modules if one.partition(".")[0] == "genai_prices"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    for one in (loading._snapshot, loading._known, shipped_prices):
        one.cache_clear()
    yield
    monkeypatch.undo()
    for one in (loading._snapshot, loading._known, shipped_prices):
        one.cache_clear()


@pytest.mark.parametrize(("address", "model", "given", "answered"), SOLD)
def test_a_model_costs_what_its_seller_or_its_maker_asks(
    address: str, model: str, given: float, answered: float
) -> None:
    """COST-04: names of answers, with the addresses they came from."""
    price = shipped_prices().price_of(model, address)
    assert (price.input, price.output) == (given, answered)
    assert shipped_prices().has(model, address)


def test_a_model_that_nobody_sells_costs_the_default(caplog: pytest.LogCaptureFixture) -> None:
    """COST-06"""
    prices = load_prices(Path(__file__).parent / "no file")
    with caplog.at_level(logging.WARNING):
        assert prices.price_of("our-own-model-7", "vllm") == Price(input=5.0, output=15.0)
    assert not prices.has("our-own-model-7", "vllm")
    assert "no price for model 'our-own-model-7'" in caplog.text
    assert not prices.has("m" * 1_000_000, "openai")


def test_a_file_of_ones_own_wins_and_may_leave_the_rest_to_the_library(tmp_path: Path) -> None:
    """COST-04, COST-08"""
    path = tmp_path / "own.json"
    own = {"openai": {"gpt-5.2": {"input": 1, "output": 2}}}
    path.write_text(json.dumps(own))
    prices = load_prices(path)
    assert prices.price_of("gpt-5.2-2025-12-11", "openai") == Price(input=1, output=2)
    assert prices.price_of("gpt-5.6-sol", "openai").input == 4
    path.write_text(json.dumps({**own, "default": {"input": 9, "output": 9}}))
    assert load_prices(path).price_of("gpt-5.6-sol", "openai") == Price(input=9, output=9)


def test_clients_have_the_shipped_table_alone(
    no_library: None,
) -> None:
    """COST-04"""
    prices = load_prices(Path(__file__).parent / "no file")
    assert prices.price_of("gpt-5.4", "openai").input == 2.5
    assert not prices.has("gpt-5.6-sol", "openai")


def test_long_prompts_and_tiers_of_the_library_are_kept() -> None:
    """LANE-01"""
    found = loading.known_price("gemini-2.5-pro", "google")
    assert found is not None
    seller, price = found
    assert seller == "google"
    assert price.long_prompt is not None
    assert (price.long_prompt.above, price.long_prompt.input) == (200_000, 2.5)
    half = price.tiers["batch"]
    assert isinstance(half, Price)
    assert (half.input, half.output) == (price.input / 2, price.output / 2)


def test_the_shipped_table_has_what_the_library_has() -> None:
    """COST-04: a release has the prices of its day; the library need not be loaded for these."""
    prices = shipped_prices()
    million = UsageStats(prompt_tokens=1_000_000, completion_tokens=1_000_000, cached_tokens=3)
    little = UsageStats(prompt_tokens=9_000, completion_tokens=9_000, cache_write_tokens=7)
    names = [one.split(":") for one in prices.models if ":" in one]
    assert len(names) > 40
    for provider, model in names:
        assert prices.knows(model, provider)
        found = loading.known_price(model, provider)
        assert found is not None, model
        for usage in (million, little):
            for tier in ("", *found[1].tiers):
                here = prices.cost_of(model, usage, tier, provider)
                assert here == pytest.approx(found[1].cost(usage, tier), rel=0.01), (model, tier)


def test_the_library_is_loaded_for_models_that_the_table_lacks_alone() -> None:
    code = """
import sys
from stepfleet.orchestrator.models.pricing.loading import shipped_prices
prices = shipped_prices()
for model in ("gpt-4o-mini-2024-07-18", "gpt-5", "openai:gpt-5-2025-08-07"):
    assert prices.has(model, "openai")
assert prices.has("claude-sonnet-4-20250514", "anthropic")
assert "genai_prices" not in sys.modules
assert not prices.knows("gpt-4o-audio-preview", "openai")
assert prices.has("gpt-4o-audio-preview", "openai")
"""
    assert "genai_prices" in loaded_by(code)
