import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepfleet.orchestrator import AgentConfig, ConfigurationError, ModelSettings
from stepfleet.orchestrator.cli.model_check import check_models, missing_key, target_of

OPENAI = AgentConfig(name="solver", model="openai:gpt-4o-mini")


@pytest.fixture
def dead_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def live_port() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def key_of(config: AgentConfig, environment: dict[str, str]) -> str | None:
    target = target_of(config, environment)
    assert target is not None
    return target.key


def test_openai_itself_needs_a_key() -> None:
    target = target_of(OPENAI, {})

    assert target is not None
    assert (target.host, target.port, target.key) == ("api.openai.com", 443, "OPENAI_API_KEY")
    finding = missing_key("solver", target, {})
    assert finding is not None
    assert "OPENAI_API_KEY" in finding.text
    assert missing_key("solver", target, {"OPENAI_API_KEY": "k"}) is None


def test_another_server_needs_none_unless_the_agent_names_its_variable() -> None:
    own = {"OPENAI_BASE_URL": "http://127.0.0.1:8000/v1"}
    assert key_of(OPENAI, own) is None

    named = OPENAI.model_copy(update={"settings": ModelSettings(api_key_env="MY_KEY")})
    assert key_of(named, own) == "MY_KEY"


def test_models_of_other_providers_are_not_looked_at() -> None:
    assert target_of(AgentConfig(name="a", model="custom:Echo"), {}) is None


@pytest.mark.parametrize(
    "url",
    [
        "https://me:s3cret@host/v1",
        "https://host/v1?key=s3cret",
        "https://host/v1#s3cret",
        "https://me:443/s3cret@host/v1",
    ],
)
@pytest.mark.parametrize(
    ("model", "variable"),
    [("openai:m", "OPENAI_BASE_URL"), ("anthropic:m", "ANTHROPIC_BASE_URL")],
)
def test_an_address_with_a_secret_in_it_is_refused_and_not_shown(
    url: str, model: str, variable: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        target_of(AgentConfig(name="solver", model=model), {variable: url})
    text = str(refused.value)
    assert f"agent 'solver': settings.base_url (or {variable})" in text
    assert "must have no user" in text
    assert "s3cret" not in text
    assert "me:" not in text


def test_a_base_url_that_is_none_is_refused_with_the_form_it_must_have() -> None:
    with pytest.raises(ConfigurationError, match="https://host/v1"):
        target_of(OPENAI, {"OPENAI_BASE_URL": "localhost:8000"})


def test_a_missing_key_is_found_before_any_connection_is_made() -> None:
    with pytest.raises(ConfigurationError, match="OPENAI_API_KEY is not set"):
        check_models([OPENAI], {})


def test_an_endpoint_is_refused_where_nobody_listens(live_port: int, dead_port: int) -> None:
    check_models([OPENAI], {"OPENAI_BASE_URL": f"http://127.0.0.1:{live_port}/v1"})
    with pytest.raises(ConfigurationError, match="cannot be reached"):
        check_models([OPENAI], {"OPENAI_BASE_URL": f"http://127.0.0.1:{dead_port}/v1"})


@pytest.mark.parametrize(
    ("model", "variable"),
    [
        ("anthropic:claude", "ANTHROPIC_API_KEY"),
        ("google:gemini", "GOOGLE_API_KEY"),
        ("groq:llama", "GROQ_API_KEY"),
        ("openai-responses:gpt", "OPENAI_API_KEY"),
    ],
)
def test_every_provider_with_a_key_names_its_variable(model: str, variable: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{variable} is not set"):
        check_models([AgentConfig(name="a", model=model)], {})


def test_the_second_variable_of_a_key_will_do_and_a_local_server_needs_none() -> None:
    gemini = AgentConfig(name="a", model="google:gemini")
    assert key_of(gemini, {"GEMINI_API_KEY": "k"}) == "GEMINI_API_KEY"
    assert key_of(AgentConfig(name="a", model="ollama:llama"), {}) is None


def test_a_provider_without_an_address_names_its_variable() -> None:
    with pytest.raises(ConfigurationError, match=r"\(or AZURE_OPENAI_ENDPOINT\) must look"):
        target_of(AgentConfig(name="a", model="azure:gpt"), {})


BEDROCK = AgentConfig(name="a", model="bedrock:anthropic.claude-opus-5")


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({}, "no region: set the variable AWS_REGION"),
        ({"AWS_BEARER_TOKEN_BEDROCK": "k"}, "no region: set the variable AWS_REGION"),
        ({"AWS_REGION": "Frankfurt"}, "AWS_REGION is 'Frankfurt', which is not a region"),
        ({"AWS_REGION": "eu-west-1"}, "no AWS credentials: set AWS_BEARER_TOKEN_BEDROCK"),
    ],
)
def test_what_bedrock_lacks_is_named_with_its_variable(
    environment: dict[str, str],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """LLM-04: region, credentials and address, before anything is submitted."""
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with pytest.raises(ConfigurationError, match="agent 'a'") as raised:
        check_models([BEDROCK], environment)
    assert problem in str(raised.value)
