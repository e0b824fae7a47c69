"""Limits as values: their names and fields, which apply to a step, what a call reserves."""

import re
from functools import partial
from typing import Any

import pytest

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.limits.budgets import Spending
from stepfleet.orchestrator.limits.estimates import (
    ENOUGH,
    FIRST_OUTPUT,
    MOST_AGENTS,
    AgentEstimates,
    Amounts,
    charged,
    reserved,
)
from stepfleet.orchestrator.limits.limit import (
    Limit,
    changed,
    exceeded,
    learns,
    limit_of,
    limits_from,
    names_of,
    own_limit,
    parsed_field,
)
from stepfleet.orchestrator.records.usage import UsageStats


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("gpt", {"in_flight": 1}, "name a model"),
        ("openai:m", {}, "it limits nothing"),
        ("openai:m", {"in_flight": 0}, "field 'in_flight': input should be greater"),
        ("openai:m", {"request_per_minute": 1}, "did you mean 'requests_per_minute'"),
        ("openai:m", {"weight": 2}, "for tenants only"),
        ("openai:m", 5, "limit 'openai:m'"),
        ("batch:a\nb", {"in_flight": 1}, "name a model"),
    ],
)
def test_a_wrong_limit_is_refused_with_the_fix(name: str, fields: object, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        limits_from({name: fields})


def test_fields_of_a_limit_are_changed_one_by_one() -> None:
    before = Limit(requests_per_minute=10, in_flight=5)
    fields = dict(map(parsed_field, ["requests_per_minute=", "tokens_per_minute=2_000_000"]))
    assert changed("openai:m", before, fields) == Limit(in_flight=5, tokens_per_minute=2_000_000)
    with pytest.raises(ConfigurationError, match="did you mean 'in_flight'"):
        parsed_field("inflight=3")
    with pytest.raises(ConfigurationError, match="is not a number"):
        parsed_field("in_flight=many")


def test_a_step_is_under_the_limits_of_its_model_tenant_batch_and_agent() -> None:
    one = Limit(in_flight=1)
    known = dict.fromkeys(("openai:m", "openai:*", "tenant:a", "batch:*", "agent:other"), one)
    given = {"model": "openai:m", "agent": "clerk"}
    assert names_of(known, **given, tenant="a", batch="b1") == (
        *("openai:m", "openai:*"),
        *("tenant:a", "batch:b1"),
    )
    assert names_of(known, **given, tenant="b", batch="") == ("openai:m", "openai:*")
    assert names_of({}, **given, tenant="a", batch="b1") == ()


def test_providers_differ_in_what_their_rates_count() -> None:
    of = partial(reserved, prompt=1000, output=300, cached=900)
    assert of("openai:m", most=2000) == Amounts(1, 1000, 2000)
    assert of("openai:m", most=None) == Amounts(1, 1000, 300)
    assert of("anthropic:m", most=200, first=True) == Amounts(1, 100, 200, 1)
    usage = UsageStats(prompt_tokens=1000, completion_tokens=50, llm_calls=1, cached_tokens=800)
    assert charged("openai:m", usage, most=2000) == Amounts(1, 1000, 2000)
    assert charged("anthropic:m", usage, most=200) == Amounts(1, 200, 50)
    assert charged("openai:m", UsageStats(cached_calls=1), most=2000) == Amounts(0)


def test_the_size_of_answers_is_learned_for_each_agent() -> None:
    learned = AgentEstimates(FIRST_OUTPUT)
    assert learned.of("a") == FIRST_OUTPUT
    for at in range(400):
        learned.learn("a", 100 if at % 4 else 1000)
    assert 80 <= learned.of("a") <= 1100
    for _ in range(400):
        learned.learn("a", 10)
    assert learned.of("a") < 15
    assert learned.of("b") == FIRST_OUTPUT


def test_an_agent_is_known_by_enough_of_its_calls() -> None:
    learned = AgentEstimates(FIRST_OUTPUT)
    for _ in range(ENOUGH):
        assert not learned.knows("a")
        learned.learn("a", 10)
    assert learned.knows("a")
    assert not learned.knows("b")
    for agent in range(MOST_AGENTS):
        learned.learn(f"{agent}", 10)
    assert not learned.knows("a"), "it was forgotten"


@pytest.mark.parametrize(
    ("kind", "given", "fix"),
    [
        ("batch", {"usdd": 5}, "did you mean 'usd'?"),
        ("batch", {"usd": -1}, "field 'usd': input should be greater than 0"),
        ("batch", {"on_budget": "hold"}, "it limits nothing"),
        ("batch", 5, "field 'limit' is 5; write fields with numbers"),
        ("batch", ["in_flight=many"], "'many' is not a number"),
        ("run", {"usd_per_day": 5}, "field 'usd_per_day': a run has"),
        ("run", {"in_flight": 5}, "field 'in_flight': a run has"),
        ("batch", {"usd": 5, "on_budget": "wait"}, "on_budget"),
    ],
)
def test_a_limit_of_its_own_that_is_none_is_named_with_its_fix(
    kind: str, given: Any, fix: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(fix)):
        own_limit(kind, given)


def test_a_run_compares_its_own_totals_with_its_budget() -> None:
    limit = limit_of("run:*", {"usd": 0.01, "calls": 3})
    before = Spending(nano=9_000_000, tokens=10, calls=2)
    assert exceeded(limit, "run:1", before, Spending(nano=1_000_000, calls=1)) is None
    over = exceeded(limit, "run:1", before, Spending(nano=1_000_001, calls=1))
    assert over is not None
    assert "usd of run:1: 0.009 USD of the budget of 0.01 USD" in over.evaluation().reason
    assert exceeded(limit, "run:1", Spending(calls=3), Spending(calls=1)) is not None


def test_learning_is_switched_off_for_models_alone() -> None:
    assert parsed_field("learn=false") == ("learn", False)
    assert parsed_field("learn=") == ("learn", None)
    assert not learns({"openai:*": limit_of("openai:*", {"learn": False})}, "openai:m at host")
    assert learns({"openai:m": Limit(in_flight=1)}, "openai:m")
    with pytest.raises(ConfigurationError, match="write learn=false"):
        parsed_field("learn=no")
    with pytest.raises(ConfigurationError, match="for models only"):
        limit_of("tenant:a", {"learn": False, "in_flight": 1})
    with pytest.raises(ConfigurationError, match="it limits nothing"):
        limit_of("openai:m", {"learn": True})
