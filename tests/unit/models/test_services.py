from pathlib import Path
from typing import Any

import pytest

from stepfleet.orchestrator import Agent, ModelSettings
from stepfleet.orchestrator.agents.config import stored_overrides
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.services import SERVICES, environment_of

PAGE = Path(__file__).parents[3] / "docs" / "providers.md"


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        ("gpt-4o", {}, "'gpt-4o' must name its provider; write 'openai:gpt-4o'"),
        ("antropic:claude", {}, "no provider 'antropic'; did you mean 'anthropic'?"),
        ("anthropic:c", {"temperature": 0.0}, "anthropic takes no 'temperature'"),
        ("openai:o", {"reasoning_budget": 0}, "openai takes no 'reasoning_budget'"),
        ("bedrock:amazon.nova-2", {"reasoning_budget": 9}, "'reasoning_budget' is for Claude's"),
        ("bedrock:anthropic.claude-opus-5", {"seed": 1}, "bedrock takes no 'seed'"),
        ("openai:a\x1fb", {}, "write at most 500 characters, all of them printable"),
        ("openai:" + "a" * 500, {}, "write at most 500 characters"),
        ("openai-responses:o", {"stop": ["x"]}, "openai-responses takes no 'stop'"),
    ],
)
def test_a_model_that_cannot_be_called_is_refused_with_the_fix(
    model: str, settings: dict[str, Any], said: str
) -> None:
    """LLM-04: before anything is submitted."""
    with pytest.raises(ConfigurationError) as raised:
        Agent("a", model=model, settings=ModelSettings.model_validate(settings))
    assert "agent 'a': field 'model': " in str(raised.value)
    assert said in str(raised.value)


@pytest.mark.parametrize("model", ["anthropic:claude", "groq:llama"])
def test_a_model_of_a_known_provider_is_taken(model: str) -> None:
    assert Agent("a", model=model).config.model == model


def test_a_model_of_an_installed_package_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "installed-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[stepfleet.models]\ninstalled = installed:make\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert Agent("a", model="installed:fast").config.model == "installed:fast"


@pytest.mark.parametrize("model", ["cohere:command", ["openai:o", "cohere:command"]])
def test_a_provider_that_is_nowhere_is_refused_before_submission(model: str | list[str]) -> None:
    known = r"no provider 'cohere' \(known: anthropic, azure, .*write 'compatible:'"
    with pytest.raises(ConfigurationError, match=known):
        Agent("a", model=model)
    with pytest.raises(ConfigurationError, match=known):
        stored_overrides(Agent("a", model="openai:o").config, {"model": model})


def test_overrides_of_a_run_are_held_to_the_same_rule() -> None:
    agent = Agent("a", model="anthropic:claude")
    with pytest.raises(ConfigurationError, match="takes no 'seed'"):
        stored_overrides(agent.config, {"settings": {"seed": 1}})


def test_the_page_lists_every_provider_with_its_variables() -> None:
    rows = {
        row.split("|")[1].strip().strip("`"): row
        for row in PAGE.read_text(encoding="utf-8").splitlines()
        if row.startswith("| `")
    }
    for name, service in SERVICES.items():
        if "as `openai`" in rows[name]:
            assert service.url == SERVICES["openai"].url
            continue
        for part in (service.url, *service.url_variables, *service.key_variables):
            assert f"{part}" in rows[name], (name, part)


def test_one_server_can_stand_for_all() -> None:
    environment = environment_of("http://127.0.0.1:1")
    assert environment["OPENAI_BASE_URL"] == "http://127.0.0.1:1/v1"
    assert environment["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1"
    assert environment["GROQ_API_KEY"] == "simulated"
