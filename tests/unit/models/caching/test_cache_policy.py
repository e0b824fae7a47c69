"""How an agent gets a cache policy, and what it says."""

from pathlib import Path
from typing import Any

import pytest

from stepfleet.orchestrator import (
    Agent,
    AgentBuilder,
    AgentConfig,
    CachePolicy,
    ConfigurationError,
    agents_of_file,
)
from stepfleet.orchestrator.agents.config import stored_overrides
from stepfleet.orchestrator.models.caching import statistics_of

FILE = """
[agents.keen]
model = "openai:m"
cache = true

[agents.quick]
model = "openai:m"

[agents.quick.cache]
ttl = 60
models = ["openai:m"]

[agents.plain]
model = "openai:m"
cache = "none"
"""


def configured(**fields: Any) -> AgentConfig:
    return Agent("a", model="openai:m", **fields).config


def test_there_is_no_cache_by_default_and_a_stored_configuration_says_nothing_of_it() -> None:
    """CACHE-01, CONF-01"""
    config = configured()
    assert config.cache is None
    assert "cache" not in config.to_json()
    assert configured(cache=False).digest == config.digest


def test_an_entry_lives_for_a_day_by_default() -> None:
    """CACHE-02, CONF-01"""
    assert configured(cache=True).cache == CachePolicy()
    assert CachePolicy().ttl == 86_400


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ttl": 0}, "'cache.ttl'"),
        ({"ttl": 10**9}, "'cache.ttl'"),
        ({"tll": 5}, "'cache.tll' is not known"),
        ("sometimes", "'cache'"),
        (3, "'cache'"),
    ],
)
def test_a_wrong_policy_is_reported_with_its_field(given: Any, said: str) -> None:
    """CACHE-02"""
    with pytest.raises(ConfigurationError, match=said):
        configured(cache=given)


def test_code_file_and_environment_set_it(tmp_path: Path) -> None:
    """CACHE-01, CONF-01"""
    (tmp_path / "agents.toml").write_text(FILE)
    environment = {
        "STEPFLEET_AGENT__QUICK__CACHE__TTL": "90",
        "STEPFLEET_AGENT__KEEN__CACHE": "false",
    }
    told = agents_of_file(tmp_path / "agents.toml", {})
    assert told["keen"].config.cache == CachePolicy()
    assert told["quick"].config.cache == CachePolicy(ttl=60, models=("openai:m",))
    assert told["plain"].config.cache is None
    over = agents_of_file(tmp_path / "agents.toml", environment)
    assert over["keen"].config.cache is None
    assert over["quick"].config.cache == CachePolicy(ttl=90, models=("openai:m",))
    built = AgentBuilder("a").with_model("openai:m").with_cache()
    assert built.build().config.cache == CachePolicy()
    assert built.with_cache(CachePolicy(ttl=5)).build().config.cache == CachePolicy(ttl=5)
    assert built.with_cache(policy=False).build().config.cache is None


@pytest.mark.parametrize(
    ("override", "policy"),
    [
        (None, None),
        (False, None),
        ({"refresh": True}, CachePolicy(ttl=7, refresh=True)),
        (CachePolicy(ttl=3), CachePolicy(ttl=3)),
    ],
)
def test_a_run_may_go_without_it_or_renew_its_entries(
    override: Any, policy: CachePolicy | None
) -> None:
    """CACHE-01"""
    config = configured(cache={"ttl": 7})
    stored = stored_overrides(config, {"cache": override})
    assert config.with_overrides(stored).cache == policy


def test_a_policy_covers_all_models_or_those_it_names() -> None:
    """CACHE-01"""
    assert CachePolicy().covers("openai:m")
    named = CachePolicy(models=("openai:m",))
    assert named.covers("openai:m")
    assert not named.covers("openai:n")


def test_statistics_are_sums_over_the_parts_by_model() -> None:
    """CACHE-08"""
    parts = [
        {"entries:openai:m": "2", "bytes:openai:m": "30", "hits:openai:m": "3", "total": "30"},
        {"entries:openai:m": "1", "bytes:openai:m": "5", "misses:openai:n": "1"},
        {},
    ]
    found = statistics_of(parts, 1000)
    assert (found.entries, found.bytes, found.hits, found.misses) == (3, 35, 3, 1)
    assert (found.hit_rate, found.max_bytes) == (0.75, 1000)
    assert list(found.by_model) == ["openai:m", "openai:n"]
    assert found.by_model["openai:m"].entries == 3
    assert statistics_of([], 0).hit_rate == 0
