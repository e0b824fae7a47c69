"""Settings of the fleet, and credentials of models, from where they may come."""

from pathlib import Path

import pytest

from stepfleet.orchestrator import ConfigurationError, ModelSettings
from stepfleet.orchestrator.models.endpoint import endpoint_of
from stepfleet.orchestrator.settings.settings import load_settings


def test_arguments_win_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CONF-05: three ways to set one thing, and the default under them."""
    monkeypatch.chdir(tmp_path)
    assert load_settings().slots == 1000
    (tmp_path / "stepfleet.toml").write_text("slots = 7\n[agents.a]\nmodel = 'openai:m'\n")
    assert load_settings().slots == 7
    monkeypatch.setenv("STEPFLEET_SLOTS", "8")
    assert load_settings().slots == 8
    assert load_settings(slots=9).slots == 9


def test_a_setting_that_cannot_be_is_reported_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CONF-04"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPFLEET_LOG_FORMAT", "yaml")
    with pytest.raises(ConfigurationError, match="'log_format'"):
        load_settings()


@pytest.mark.parametrize("text", ["", "{", "none"])
def test_a_variable_that_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("STEPFLEET_LIMITS", text)
    with pytest.raises(ConfigurationError, match="STEPFLEET_LIMITS is not valid JSON"):
        load_settings()


def test_what_is_no_setting_in_the_file_is_reported_with_what_may_be_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CONF-04, CONF-05"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stepfleet.toml").write_text("slot = 7\n")
    with pytest.raises(ConfigurationError, match="'slot' is not a setting; did you mean 'slots'"):
        load_settings()
    (tmp_path / "stepfleet.toml").write_text("slots = \n")
    with pytest.raises(ConfigurationError, match=r"stepfleet\.toml: "):
        load_settings()


def test_key_and_address_of_a_model_come_from_the_environment() -> None:
    """CONF-06: what the agent says of the address, and of the key's variable, wins."""
    environment = {
        "OPENAI_API_KEY": "sk-mine",
        "OPENAI_BASE_URL": "http://localhost:8000/v1",
        "OTHER_KEY": "sk-other",
    }
    found = endpoint_of(ModelSettings(), environment)
    assert found.url == "http://localhost:8000/v1/chat/completions"
    assert found.headers["authorization"] == "Bearer sk-mine"
    own = ModelSettings(base_url="http://localhost:9000/v1", api_key_env="OTHER_KEY")
    named = endpoint_of(own, environment)
    assert named.url == "http://localhost:9000/v1/chat/completions"
    assert named.headers["authorization"] == "Bearer sk-other"
