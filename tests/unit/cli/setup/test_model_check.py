"""The call of one token before a submission: what refuses it, what is only said, where keys go."""

from collections.abc import Iterator
from typing import Any

import pytest

from stepfleet.orchestrator import AgentConfig, ConfigurationError, ModelSettings
from stepfleet.orchestrator.batches.openai_format import PLAIN_AGENT
from stepfleet.orchestrator.cli.setup import model_check
from stepfleet.orchestrator.cli.setup.model_check import check_calls, fix_of, probe_of
from stepfleet.worker.models import Models
from stepfleet.worker.models.http_model import HttpModel
from stepfleet.worker.testing import Fault, ModelServer, Reply

CONFIG = AgentConfig(name="solver", model="openai:tiny")
KEY = "sk-of-this-test-0123456789"


@pytest.fixture
def model() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


def checked(model: ModelServer, *configs: AgentConfig, own_keys: bool = False) -> list[str]:
    said: list[str] = []
    environment = {"OPENAI_BASE_URL": model.url, "OPENAI_API_KEY": KEY}
    check_calls(configs or (CONFIG,), environment, said.append, own_keys=own_keys)
    return said


def test_a_model_that_answers_is_called_once_for_one_token(model: ModelServer) -> None:
    model.follow(lambda _: Reply("p"))
    other = CONFIG.model_copy(update={"name": "another"})
    assert checked(model, CONFIG, other) == []
    (request,) = model.requests
    assert (request.body["model"], request.body["max_tokens"]) == ("tiny", 1)
    assert "authorization" in request.headers


@pytest.mark.parametrize(
    ("fault", "fix"),
    [
        (Fault("unauthorized"), "Fix: set OPENAI_API_KEY to a valid key"),
        (Fault("forbidden"), "Fix: allow the key in OPENAI_API_KEY to use the model"),
        (Fault("not_found"), "Fix: correct the agent's model"),
    ],
)
def test_what_every_run_would_meet_refuses_with_the_fix(
    model: ModelServer, fault: Fault, fix: str
) -> None:
    model.follow(lambda _: fault)
    with pytest.raises(ConfigurationError) as refused:
        checked(model)
    assert "agent 'solver'" in refused.value.message
    assert "model 'tiny'" in refused.value.message
    assert model.url in refused.value.message
    assert fix in refused.value.message
    assert "--no-check" in refused.value.message
    with pytest.raises(ConfigurationError, match="if the workers have another: --no-check"):
        checked(model, own_keys=True)


@pytest.mark.parametrize("kind", ["rate_limited", "server_error", "overloaded", "reset"])
def test_what_may_pass_is_said_and_goes_on(model: ModelServer, kind: str) -> None:
    model.follow(lambda _: Fault(kind))
    (said,) = checked(model)
    assert "going on" in said


def test_a_model_without_an_answer_delays_for_a_bounded_time(
    model: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_check, "SECONDS", 0.2)
    model.follow(lambda _: Fault("hang"))
    (said,) = checked(model)
    assert "no answer within 0.2 s; going on" in said


def test_where_workers_may_have_another_key_only_the_own_one_is_tried(model: ModelServer) -> None:
    environment = {"OPENAI_BASE_URL": model.url}
    check_calls([CONFIG], environment, pytest.fail, own_keys=True)
    assert model.requests == ()


def test_keys_go_where_workers_send_them() -> None:
    def sent(environment: dict[str, str], **settings: Any) -> tuple[bool, str]:
        config = CONFIG.model_copy(update={"settings": ModelSettings(**settings)})
        probe = probe_of(config, environment)
        assert probe is not None
        return probe.has_key, list(probe.body)[-1]

    known = {"OPENAI_API_KEY": KEY, "MINE": KEY}
    assert sent(known) == (True, "max_completion_tokens")
    assert sent(known, base_url="https://other.example/v1") == (False, "max_tokens")
    assert sent(known, base_url="https://other.example/v1", api_key_env="MINE")[0]
    own = {**known, "OPENAI_BASE_URL": "https://other.example/v1"}
    assert sent(own, base_url="https://other.example/v1/")[0]
    assert sent({**known, "OPENAI_API_KEY": "no\nheader"})[0] is False


def test_models_of_others_are_not_called_and_the_switch_forbids_all_but_this_machine() -> None:
    assert probe_of(CONFIG.model_copy(update={"model": "own:tiny"}), {}) is None
    assert probe_of(CONFIG.model_copy(update={"name": PLAIN_AGENT}), {}) is None
    off = {"STEPFLEET_ALLOW_MODEL_REQUESTS": "0"}
    assert probe_of(CONFIG, off) is None
    assert probe_of(CONFIG, {**off, "OPENAI_BASE_URL": "http://127.0.0.1:1/v1"}) is not None


@pytest.mark.parametrize(
    ("status", "text", "part"),
    [
        (400, "API key not valid. Please pass a valid API key.", "valid key"),
        (400, "model_not_found The model `x` does not exist", "correct the agent's model"),
        (429, "insufficient_quota You exceeded your current quota", "add credit"),
        (402, "Payment Required", "add credit"),
        (302, "", "the address"),
        (405, "Method not allowed", "the address"),
        (400, "Unsupported parameter: 'max_tokens'", None),
        (422, "messages: too short", None),
        (429, "Rate limit reached", None),
        (500, "model overloaded", None),
        (200, "", None),
    ],
)
def test_the_fix_names_what_is_wrong(status: int, text: str, part: str | None) -> None:
    probe = probe_of(CONFIG, {})
    assert probe is not None
    fix = fix_of(probe, status, text)
    assert (fix is None) if part is None else (fix is not None and part in fix)


@pytest.mark.parametrize("variable", ["ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"])
@pytest.mark.parametrize("name", ["anthropic:claude-x", "openai:tiny"])
def test_a_key_goes_as_the_workers_send_it(name: str, variable: str) -> None:
    environment = {variable: KEY, "OPENAI_API_KEY": KEY}
    config = CONFIG.model_copy(update={"model": name})
    probe = probe_of(config, environment)
    assert probe is not None
    models = Models(environment=environment)
    llm, _ = models.resolve(name)
    assert isinstance(llm, HttpModel)
    sent = llm._endpoint(config.settings).headers
    assert dict(probe.headers) == dict(sent)
