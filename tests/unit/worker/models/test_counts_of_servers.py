"""How servers behind chat completions and Responses count tokens, and what that costs."""

from typing import Any

import pytest

from stepfleet.orchestrator import UsageStats
from stepfleet.orchestrator.models.pricing import Price
from stepfleet.worker.models.openai.chat import usage_of
from stepfleet.worker.models.responses import usage_of as usage_of_responses

CLAUDE = Price(input=3, output=15, cached_input=0.3, cache_write=3.75)
GROK = Price(input=3, output=15)
DEEPSEEK = Price(input=0.27, output=1.1, cached_input=0.07)


def counts(usage: UsageStats | None) -> tuple[int, ...]:
    assert usage is not None
    kinds = (usage.cached_tokens, usage.cache_write_tokens, usage.reasoning_tokens)
    return usage.prompt_tokens, usage.completion_tokens, *kinds


LITELLM = {
    "prompt_tokens": 500_000,
    "completion_tokens": 10_000,
    "total_tokens": 510_000,
    "cache_creation_input_tokens": 400_000,
    "cache_read_input_tokens": 50_000,
    "prompt_tokens_details": {"cached_tokens": 50_000, "cache_creation_tokens": 400_000},
}


@pytest.mark.parametrize("left_out", ["prompt_tokens_details", "cache_creation_input_tokens"])
def test_cache_writes_of_anthropic_behind_litellm_have_their_price(left_out: str) -> None:
    """COST-02"""
    found = usage_of({name: one for name, one in LITELLM.items() if name != left_out})
    assert counts(found) == (500_000, 10_000, 50_000, 400_000, 0)
    assert found is not None
    expected = (50_000 * 3 + 400_000 * 3.75 + 50_000 * 0.3 + 10_000 * 15) / 1e6
    assert CLAUDE.cost(found) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"prompt_tokens": 200, "completion_tokens": 100, "total_tokens": 300,
             "cache_read_input_tokens": 600, "cache_creation_input_tokens": 200,
             "prompt_tokens_details": {"cached_tokens": 600}},
            (1000, 100, 600, 200, 0),
        ),
        (
            {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100,
             "prompt_tokens_details": {"cached_tokens": 5000}},
            (1000, 100, 1000, 0, 0),
        ),
        (
            {"input_tokens": 1000, "output_tokens": 100,
             "input_tokens_details": {"cached_tokens": 600}},
            (1000, 100, 600, 0, 0),
        ),
    ],
)  # fmt: skip
def test_the_total_and_the_cache_fit_the_prompt(
    given: dict[str, Any], expected: tuple[int, ...]
) -> None:
    found = usage_of(given)
    assert counts(found) == expected
    assert found is not None
    assert found.total_tokens == found.prompt_tokens + found.completion_tokens


def test_cache_writes_of_openrouter_have_their_price() -> None:
    details = {"cached_tokens": 0, "cache_write_tokens": 90}
    found = usage_of(
        {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": details}
    )
    assert counts(found) == (100, 1, 0, 90, 0)


def test_a_prompt_cache_that_is_counted_beside_the_prompt_is_a_part_of_it_here() -> None:
    beside = {"cache_creation_input_tokens": 300, "cache_read_input_tokens": 200}
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    assert counts(usage_of({**usage, **beside, "total_tokens": 515})) == (510, 5, 200, 300, 0)
    assert counts(usage_of({**usage, **beside})) == (510, 5, 200, 300, 0)


def test_reasoning_of_xai_beside_the_completion_is_paid_for() -> None:
    """COST-02"""
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 10,
        "total_tokens": 510,
        "completion_tokens_details": {"reasoning_tokens": 400},
    }
    found = usage_of(usage)
    assert counts(found) == (100, 410, 0, 0, 400)
    assert found is not None
    assert found.total_tokens == 510
    assert GROK.cost(found) == pytest.approx((100 * 3 + 410 * 15) / 1e6)
    without = {name: one for name, one in usage.items() if name != "total_tokens"}
    assert counts(usage_of(without)) == (100, 410, 0, 0, 400)


def test_thoughts_of_gemini_that_only_the_total_has_are_paid_for() -> None:
    """COST-02: its endpoint for OpenAI's clients has no details."""
    found = usage_of({"prompt_tokens": 35, "completion_tokens": 12, "total_tokens": 109})
    assert counts(found) == (35, 74, 0, 0, 62)


@pytest.mark.parametrize(
    ("total", "details"),
    [
        (110, {"reasoning_tokens": 8}),
        (None, {"reasoning_tokens": 8}),
        (150, {"reasoning_tokens": 8}),
        (90, {"reasoning_tokens": 8}),
    ],
)
def test_reasoning_within_the_completion_is_not_paid_for_twice(
    total: int | None, details: dict[str, int]
) -> None:
    usage: dict[str, Any] = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": total}
    assert counts(usage_of({**usage, "completion_tokens_details": details})) == (100, 10, 0, 0, 8)


@pytest.mark.parametrize("field", ["prompt_cache_hit_tokens", "cached_tokens", "num_cached_tokens"])
def test_what_deepseek_moonshot_and_mistral_had_in_their_caches_costs_less(field: str) -> None:
    """COST-02"""
    usage = {"prompt_tokens": 1_000_000, "completion_tokens": 0, field: 750_000}
    found = usage_of({**usage, "total_tokens": 1_000_000})
    assert counts(found) == (1_000_000, 0, 750_000, 0, 0)
    assert found is not None
    assert DEEPSEEK.cost(found) == pytest.approx(0.25 * 0.27 + 0.75 * 0.07)


@pytest.mark.parametrize("strange", [None, "7", -1, [], {"cached_tokens": 3}, 10**30])
def test_counts_that_are_none_are_left_out(strange: Any) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "prompt_cache_hit_tokens": strange}
    details = {"prompt_tokens_details": strange, "completion_tokens_details": strange}
    found = counts(usage_of({**usage, **details, "total_tokens": strange}))
    assert found[:2] == (10, 5)
    assert found[3:] == (0, 0)


def test_responses_count_reasoning_in_the_same_way() -> None:
    usage = {
        "input_tokens": 100,
        "output_tokens": 10,
        "output_tokens_details": {"reasoning_tokens": 400},
    }
    assert counts(usage_of_responses({**usage, "total_tokens": 510})) == (100, 410, 0, 0, 400)
    within = {**usage, "output_tokens": 410, "total_tokens": 510}
    assert counts(usage_of_responses(within)) == (100, 410, 0, 0, 400)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"prompt_tokens": 100, "completion_tokens": None, "total_tokens": 120}, (100, 20)),
        ({"completion_tokens": 20, "total_tokens": 120}, (100, 20)),
        ({"prompt_tokens": "100", "completion_tokens": "20", "total_tokens": "120"}, (100, 20)),
        ({"prompt_tokens": 100, "total_tokens": 100}, None),
        ({"total_tokens": 120}, None),
        ({"prompt_tokens": "many", "completion_tokens": 20}, None),
    ],
)
def test_a_count_that_is_missing_is_the_rest_of_the_total(
    given: dict[str, Any], expected: tuple[int, int] | None
) -> None:
    renamed = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}
    of_responses = {renamed.get(name, name): value for name, value in given.items()}
    for found in (usage_of(given), usage_of_responses(of_responses)):
        assert (found and (found.prompt_tokens, found.completion_tokens)) == expected
        assert found is None or found.total_tokens == 120
