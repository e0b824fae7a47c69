"""A run's changes to its agent's configuration, in the form that is stored."""

import json

import pytest

from stepfleet.orchestrator import AgentConfig, ConfigurationError, ErrorPolicy, ModelSettings
from stepfleet.orchestrator.agents.config import merged_overrides, stored_overrides

CONFIG = AgentConfig(
    name="a",
    model="openai:m",
    settings=ModelSettings(temperature=0.7, seed=1),
    error_policy=ErrorPolicy.retry_all(5),
)


def test_what_is_stored_gives_the_same_configuration_again() -> None:
    stored = stored_overrides(
        CONFIG,
        {
            "max_steps": 3,
            "time_limit": None,
            "settings": {"temperature": None, "max_tokens": 9},
            "error_policy": {"max_retries": 2},
        },
    )
    changed = CONFIG.with_overrides(json.loads(json.dumps(stored)))
    assert changed.max_steps == 3
    assert changed.time_limit is None
    assert changed.settings == ModelSettings(seed=1, max_tokens=9)
    assert changed.error_policy == ErrorPolicy.retry_all(2)


def test_records_are_taken_as_well_as_data() -> None:
    stored = stored_overrides(
        CONFIG,
        {"error_policy": ErrorPolicy.ignore_tool_errors(), "settings": ModelSettings(seed=4)},
    )
    changed = CONFIG.with_overrides(json.loads(json.dumps(stored)))
    assert changed.error_policy == ErrorPolicy.ignore_tool_errors()
    assert changed.settings == ModelSettings(temperature=0.7, seed=4)


def test_later_overrides_win_field_by_field_of_the_settings() -> None:
    merged = merged_overrides(
        {"max_steps": 1, "settings": {"seed": 1, "top_p": 0.5}},
        {"settings": {"seed": 2}, "time_limit": 9},
    )
    assert merged == {"max_steps": 1, "time_limit": 9, "settings": {"seed": 2, "top_p": 0.5}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nothing": 1}, "field 'nothing' is not known"),
        ({"max_steps": "many"}, "field 'max_steps'"),
        ({"name": "b"}, "field 'name' cannot be overridden"),
        ({"settings": {"temperature": 9}}, "field 'settings.temperature'"),
        ({"settings": None}, "field 'settings' must be an object"),
        ({"settings": {"base_url": "http://elsewhere"}}, "'settings.base_url' cannot be"),
        ({"error_policy": {"max_retries": -1}}, "field 'error_policy.max_retries'"),
        ({"tool_choice": "jump"}, "field 'tool_choice': 'jump'"),
    ],
)
def test_a_wrong_override_is_reported_by_its_field(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        stored_overrides(CONFIG, given)
    assert said in caught.value.message
