import json
import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from stepfleet.orchestrator import ConfigurationError, CostStatistics, UsageStats
from stepfleet.orchestrator.models.pricing import (
    CostLedger,
    ModelCosts,
    Price,
    Prices,
    cost_of,
    current_prices,
    load_prices,
    loading,
)
from stepfleet.orchestrator.models.pricing.loading import shipped_prices
from stepfleet.orchestrator.models.pricing.prices import FALLBACK, fitting_key, parse_prices

Write = Callable[[str | Path, Any], Path]


def price(given: float, answered: float, cached: float | None = None) -> Price:
    return Price(input=given, output=answered, cached_input=cached)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder and home, and no variables."""
    for name in ("work", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("STEPFLEET_PRICING_CONFIG", raising=False)
    monkeypatch.delenv("SPARK_PRICING_CONFIG", raising=False)
    return tmp_path


@pytest.fixture
def write(folder: Path) -> Write:
    """Write a pricing file in which the model `m` costs the given price."""

    def file(name: str | Path, price: float) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"p": {"m": {"input": price, "output": 0}}}))
        return path

    return file


def usage(prompt: int, completion: int, cached: int = 0) -> UsageStats:
    return UsageStats(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


def price_of_m() -> float:
    return current_prices().price_of("m").input


def test_a_call_is_recorded_with_its_cost() -> None:
    """COST-01, COST-02: 1,000/500 tokens at 5.00/15.00 cost 0.0125."""
    ledger = CostLedger(Prices(models={"gpt": price(5.0, 15.0)}))
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    call = ledger.record_call("gpt", 1000, 500, moment)
    assert call.cost == pytest.approx(0.0125)
    assert (call.model_id, call.input_tokens, call.output_tokens) == ("gpt", 1000, 500)
    assert call.timestamp == moment
    assert ledger.calls == (call,)


def test_a_call_without_a_timestamp_is_of_now() -> None:
    """COST-01: the timestamp is optional."""
    before = datetime.now(UTC)
    call = CostLedger(Prices(models={"gpt": price(1, 1)})).record_call("gpt", 1, 1)
    assert before <= call.timestamp <= datetime.now(UTC)


def test_statistics_are_zero_without_calls() -> None:
    """COST-03: no calls."""
    assert CostLedger().statistics() == CostStatistics(
        total_calls=0, total_tokens=0, total_cost=0.0, by_model={}
    )


def test_statistics_sum_all_calls_and_each_models() -> None:
    """COST-03: totals and by_model."""
    ledger = CostLedger(Prices(models={"a": price(1.0, 2.0), "b": price(10.0, 20.0)}))
    for model in ("a", "b", "a"):
        ledger.record_call(model, 1_000_000, 500_000)
    statistics = ledger.statistics()
    assert (statistics.total_calls, statistics.total_tokens) == (3, 4_500_000)
    assert statistics.total_cost == pytest.approx(24.0)
    assert statistics.by_model["a"] == ModelCosts(
        calls=2, input_tokens=2_000_000, output_tokens=1_000_000, tokens=3_000_000, cost=4.0
    )
    ledger.reset()
    assert ledger.statistics() == CostStatistics()


def test_the_search_takes_the_first_file_in_order(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COST-04: variable, its alias, working folder, home, the alias's home, shipped."""
    assert current_prices() is shipped_prices()
    write("home/.spark/model_pricing.json", 1)
    assert price_of_m() == 1
    write("home/.stepfleet/model_pricing.json", 2)
    assert price_of_m() == 2
    write("work/model_pricing.json", 3)
    assert price_of_m() == 3
    monkeypatch.setenv("SPARK_PRICING_CONFIG", str(write("alias.json", 4)))
    assert price_of_m() == 4
    monkeypatch.setenv("STEPFLEET_PRICING_CONFIG", str(write("own.json", 5)))
    assert price_of_m() == 5
    assert cost_of("m", usage(1_000_000, 0)) == 5


def test_an_explicit_path_overrides_the_search(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COST-08: the argument wins over the variable."""
    monkeypatch.setenv("STEPFLEET_PRICING_CONFIG", str(write("own.json", 5)))
    assert load_prices(write("named.json", 6)).price_of("m").input == 6


def test_a_changed_file_is_read_again(write: Write) -> None:
    path = write("work/model_pricing.json", 1)
    assert price_of_m() == 1
    first = current_prices()
    assert current_prices() is first
    write("work/model_pricing.json", 2)
    os.utime(path, ns=(1, 1))
    assert price_of_m() == 2


def test_the_shipped_table_reads_and_says_when_it_was_true() -> None:
    """COST-04: the package's own file."""
    prices = shipped_prices()
    found = prices.price_of("openai:gpt-4o-mini")
    assert (found.input, found.output, found.cached_input) == (0.15, 0.60, 0.075)
    assert prices.default == price(5.0, 15.0)


@pytest.mark.parametrize("shipped", ["not_there.json", "search.py"])
def test_without_any_table_one_price_holds_for_everything(
    shipped: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """COST-04: the hard-coded fallback, where the package's own file is gone or unreadable."""
    monkeypatch.setattr(loading, "SHIPPED", shipped)
    with caplog.at_level(logging.WARNING):
        prices = shipped_prices.__wrapped__()
    assert prices.cost_of("whatever", usage(1000, 500)) == pytest.approx(0.0125)
    assert "one price for all models" in caplog.text


def test_the_file_format_groups_models_by_provider() -> None:
    """COST-05: provider -> model -> prices, a default, notes begin with an underscore."""
    prices = parse_prices(
        {
            "_comment": "USD per million tokens",
            "openai": {"_note": "x", "gpt-4o": {"input": 2.5, "output": 10.0, "_as_of": "2026"}},
            "anthropic": {"claude-sonnet-4": {"input": 3.0, "output": 15.0}},
            "default": {"input": 1.0, "output": 2.0},
        },
        "test",
    )
    assert prices.price_of("gpt-4o") == price(2.5, 10.0)
    assert prices.price_of("openai:gpt-4o") == price(2.5, 10.0)
    assert prices.price_of("openai/gpt-4o") == price(2.5, 10.0)
    assert prices.default == price(1.0, 2.0)
    assert not [name for name in prices.models if "_note" in name or "_comment" in name]


def test_models_outside_a_group_are_read() -> None:
    """COST-05: a flat file."""
    assert parse_prices({"m": {"input": 1, "output": 2}}, "t").price_of("m") == Price(
        input=1.0, output=2.0
    )


def test_the_same_id_of_two_providers_keeps_both_prices() -> None:
    one, other = {"m": {"input": 1, "output": 1}}, {"m": {"input": 2, "output": 2}}
    prices = parse_prices({"one": one, "other": other}, "t")
    assert prices.price_of("m").input == 1
    assert prices.price_of("other:m").input == 2


def test_an_unknown_model_costs_the_default_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """COST-06: default price, and a warning."""
    prices = Prices(models={"gpt-4": price(30, 60)}, default=price(1, 1))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert prices.price_of("mystery") == price(1, 1)
    assert [record.getMessage().split(" in ")[0] for record in caplog.records] == [
        "no price for model 'mystery'"
    ]


@pytest.mark.parametrize("order", list(permutations(["gpt-4", "gpt-4o", "gpt-4o-mini"])))
def test_a_dated_variant_costs_what_the_longest_prefix_costs(order: tuple[str, ...]) -> None:
    """COST-06: in whatever order the file lists them."""
    amounts = {"gpt-4": 30.0, "gpt-4o": 2.5, "gpt-4o-mini": 0.15}
    prices = Prices(models={name: price(amounts[name], 0) for name in order})
    assert prices.price_of("gpt-4o-mini-2024-07-18").input == 0.15
    assert prices.price_of("openai:gpt-4o-2024-11-20").input == 2.5


def test_another_model_whose_name_only_begins_alike_is_unknown() -> None:
    prices = Prices(models={"gpt-4": price(30, 60)}, default=price(1, 1))
    assert prices.price_of("gpt-4o") == price(1, 1)


@pytest.mark.parametrize(
    "text",
    [
        "{broken",
        "[]",
        "[" * 100_000,
        '{"openai": 5}',
        '{"openai": {"m": {"input": 1}}}',
        '{"openai": {"m": {"input": "1", "output": 1}}}',
        '{"openai": {"m": {"input": -1, "output": 1}}}',
        '{"openai": {"m": {"input": NaN, "output": 1}}}',
        '{"openai": {"m": {"input": true, "output": 1}}}',
    ],
)
def test_an_invalid_file_falls_back_with_a_warning(
    folder: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """COST-07: broken JSON, wrong shapes, senseless prices."""
    path = folder / "broken.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert load_prices(path) is shipped_prices()
    assert "broken.json cannot be used" in caplog.text


def test_a_file_that_is_not_there_falls_back_with_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """COST-07: a variable that names no file is noticed."""
    monkeypatch.setenv("STEPFLEET_PRICING_CONFIG", str(folder / "missing.json"))
    with caplog.at_level(logging.WARNING):
        assert current_prices() is shipped_prices()
    assert "missing.json cannot be used" in caplog.text


def test_an_invalid_entry_is_named() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"file: openai\.gpt: field 'input': input should be a valid number",
    ):
        parse_prices({"openai": {"gpt": {"input": "free", "output": 1}}}, "file")


def test_cached_tokens_cost_their_own_price_where_there_is_one() -> None:
    assert price(2.0, 8.0, 0.5).cost(usage(1_000_000, 0, cached=400_000)) == pytest.approx(1.4)
    assert price(2.0, 8.0).cost(usage(1_000_000, 0, cached=400_000)) == pytest.approx(2.0)
    assert FALLBACK.cost(UsageStats()) == 0


@pytest.mark.parametrize(
    "model",
    [
        "us.anthropic.claude-haiku-4-5-20251001-v1:0",
        "bedrock:anthropic.claude-haiku-4-5-20251001-v1:0",
        "arn:aws:bedrock:eu-west-1:123456789012:inference-profile/eu.anthropic.claude-haiku-4-5",
    ],
)
def test_a_model_behind_its_makers_name_has_its_price_unless_it_has_one_of_its_own(
    model: str,
) -> None:
    known = {"claude-haiku-4-5": 1, "claude": 2}
    assert fitting_key(model, known) == "claude-haiku-4-5"
    assert fitting_key(model, {**known, model: 3}) == model
