"""Names of limits: by model, address and account, for people to read."""

from typing import Any

import pytest

from stepfleet.orchestrator.limits.limit import AT, limit_of, model_of
from stepfleet.orchestrator.models.services import limit_name
from stepfleet.orchestrator.records.responses import ModelSettings


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "openai:m"),
        ({"base_url": "https://api.openai.com/v1/"}, "openai:m"),
        ({"api_key_env": "OPENAI_API_KEY"}, "openai:m"),
        ({"base_url": "https://gateway.example/v1"}, "openai:m at gateway.example/v1"),
        ({"api_key_env": "TEAM_KEY"}, "openai:m at api.openai.com/v1 with TEAM_KEY"),
        (
            {"base_url": "http://h:8000", "api_key_env": "TEAM_KEY", "organization": "org-1"},
            "openai:m at h:8000 with TEAM_KEY of org-1",
        ),
        ({"base_url": "https://user:secret@h/v1?key=secret"}, "openai:m at h/v1"),
    ],
)
def test_a_limit_is_named_by_model_address_and_account(settings: dict[str, Any], name: str) -> None:
    """LLM-15"""
    found = limit_name("openai:m", ModelSettings(**settings))
    assert found == name
    assert model_of(found) == "openai:m"
    limit_of(found, {"in_flight": 1})


def test_a_long_address_is_cut_and_still_its_own() -> None:
    model = "openai:" + "m" * 493
    names = [
        limit_name(model, ModelSettings(base_url=f"https://h/{'x' * 1000}{n}")) for n in range(2)
    ]
    assert names[0] != names[1]
    for name in names:
        limit_of(name, {"in_flight": 1})
        assert name.startswith(model + AT)


def test_a_provider_of_a_package_has_names_too() -> None:
    assert limit_name("mine:m", ModelSettings(api_key_env="K")) == "mine:m at home with K"
