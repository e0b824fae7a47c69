"""Prices that an agent states for its own model calls."""

from pathlib import Path
from typing import Any

import pytest

from stepfleet.orchestrator import (
    Agent,
    AgentBuilder,
    AgentConfig,
    ConfigurationError,
    UsageStats,
    agents_of_file,
    builder_of,
)
from stepfleet.orchestrator.agents.config import stored_overrides
from stepfleet.orchestrator.client.copies import of_agent
from stepfleet.orchestrator.models.pricing import Price, stated_cost

MILLION = UsageStats(prompt_tokens=1_000_000, completion_tokens=1_000_000)
BY_MODEL = {
    "gpt-4o": {"input": 1, "output": 0},
    "gpt-4o-mini": {"input": 2, "output": 0},
    "local:mine": {"input": 3, "output": 0},
}


def priced(pricing: Any) -> AgentConfig:
    return Agent("clerk", model="openai:gpt-4o", pricing=pricing).config


@pytest.mark.parametrize(
    ("names", "cost"),
    [
        (("gpt-4o", "openai:gpt-4o"), 1),
        (("gpt-4o-2024-08-06", "openai:gpt-4o"), 1),
        (("gpt-4o-mini-2024-07-18", "openai:gpt-4o-mini"), 2),
        (("local:mine", "local:mine"), 3),
        (("unheard-of", "openai:gpt-4o"), 1),
        (("gpt-4omni", "openai:other"), None),
    ],
)
def test_a_call_costs_what_the_agent_says_of_its_model(
    names: tuple[str, str], cost: float | None
) -> None:
    """CONF-01, COST-06: by the name in the answer, then by the name that was asked for."""
    assert stated_cost(priced(BY_MODEL).pricing, names, MILLION) == cost


def test_one_price_is_that_of_all_the_agents_calls() -> None:
    pricing = priced({"input": 0.5, "output": 1.5, "cached_input": 0.1}).pricing
    assert stated_cost(pricing, ("whatever", "m"), MILLION) == pytest.approx(2.0)
    cached = UsageStats(prompt_tokens=1_000_000, cached_tokens=1_000_000)
    assert stated_cost(pricing, ("whatever", "m"), cached) == pytest.approx(0.1)
    both = priced({**BY_MODEL, "input": 7, "output": 0}).pricing
    assert stated_cost(both, ("gpt-4o", "m"), MILLION) == 1
    assert stated_cost(both, ("other", "m"), MILLION) == 7


def test_the_prices_are_stored_with_the_configuration() -> None:
    """CONF-07: any worker reads the same ones."""
    config = priced(BY_MODEL)
    assert AgentConfig.from_json(config.to_json()) == config
    assert "pricing" not in Agent("clerk", model="openai:gpt-4o").config.to_json()


@pytest.mark.parametrize(
    ("pricing", "told"),
    [
        ({"input": 1}, "'pricing.default.output' is missing"),
        ({"m": {"input": -1, "output": 0}}, r"'pricing.m.input': input should be greater"),
        ({"m": {"input": 1, "output": 0, "cache": 1}}, "'pricing.m.cache' is not known"),
        ({"m": 3}, r"'pricing.m': input should be"),
        (3, "'pricing': input should be"),
        ({"input": float("inf"), "output": 0}, "finite"),
    ],
)
def test_a_wrong_price_is_reported_with_its_field(pricing: Any, told: str) -> None:
    """CONF-04"""
    with pytest.raises(ConfigurationError, match=told):
        priced(pricing)


def test_file_environment_and_code_state_prices(tmp_path: Path) -> None:
    """CONF-02, CONF-05"""
    file = tmp_path / "agents.toml"
    file.write_text(
        '[agents.one]\nmodel = "openai:m"\n[agents.one.pricing]\ninput = 1\noutput = 2\n'
        '[agents.two]\nmodel = "openai:m"\n[agents.two.pricing."gpt-4.1"]\ninput = 3\noutput = 4\n'
    )
    agents = agents_of_file(file, {"STEPFLEET_AGENT__ONE__PRICING__OUTPUT": "9"})
    assert agents["one"].config.pricing == {"default": Price(input=1, output=9)}
    assert agents["two"].config.pricing == {"gpt-4.1": Price(input=3, output=4)}
    built = builder_of("one", file, {}).with_pricing({"m": {"input": 5, "output": 6}}).build()
    assert built.config.pricing == {"m": Price(input=5, output=6)}
    started = AgentBuilder("a").with_model("openai:m").with_pricing(BY_MODEL)
    assert started.with_fields(pricing={"gpt-4o": {"input": 8}}).build().config.pricing[
        "gpt-4o"
    ] == Price(input=8, output=0)


def test_whoever_submits_a_line_or_a_checkpoint_sets_no_prices() -> None:
    known = priced(BY_MODEL)
    with pytest.raises(ConfigurationError, match="'pricing' cannot be overridden per run"):
        stored_overrides(known, {"pricing": {"input": 0, "output": 0}})
    forged = known.model_copy(update={"pricing": priced({"input": 0, "output": 0}).pricing})
    assert of_agent(forged, known).pricing == known.pricing


def test_a_price_holds_for_the_versions_of_its_model_and_not_for_its_relatives() -> None:
    agent = Agent("priced", model="openai:gpt-4o", pricing={"gpt-4o": {"input": 2, "output": 8}})
    usage = UsageStats(prompt_tokens=1_000_000)

    def cost(model: str) -> float | None:
        return stated_cost(agent.config.pricing, [model], usage)

    assert cost("gpt-4o") == cost("openai:gpt-4o") == cost("gpt-4o-2024-08-06") == 2
    assert cost("gpt-4o-latest") == 2
    assert cost("gpt-4o-mini") is cost("gpt-4o-mini-2024-07-18") is None


@pytest.mark.parametrize(
    ("pricing", "told"),
    [
        ({"default": 0.5, "input": 1, "output": 2}, "'default' must be a table"),
        ({"input": 1, "output": 2, "cached": 0.5}, "'cached' is neither a price's field"),
    ],
)
def test_a_slip_in_prices_is_reported_with_what_would_be_right(
    pricing: dict[str, float], told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Agent("priced", model="openai:gpt-4o", pricing=pricing)
