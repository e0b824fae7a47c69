"""The call of one token before a submission: what refuses it, what is only said, where keys go."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from stepfleet.orchestrator import (
    AgentConfig,
    ConfigurationError,
    Message,
    ModelRequest,
    ModelSettings,
)
from stepfleet.orchestrator.batches.files.openai_format import PLAIN_AGENT
from stepfleet.orchestrator.cli import model_check
from stepfleet.orchestrator.cli.model_check import check_calls, fix_of, probe_of
from stepfleet.orchestrator.models.endpoint import ROUTES
from stepfleet.orchestrator.models.failures import refusal
from stepfleet.orchestrator.models.services import SERVICES, Api, environment_of
from stepfleet.worker.models import Models
from stepfleet.worker.testing.scenario import Fault, Reply
from stepfleet.worker.testing.server import ModelServer

CONFIG = AgentConfig(name="solver", model="openai:tiny")
KEY = "sk-of-this-test-0123456789"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def model() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


def checked(model: ModelServer, *configs: AgentConfig, own_keys: bool = False) -> list[str]:
    said: list[str] = []
    environment = {"OPENAI_BASE_URL": model.url, "OPENAI_API_KEY": KEY}
    asyncio.run(check_calls(configs or (CONFIG,), environment, said.append, own_keys=own_keys))
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
    assert "continuing" in said


def test_a_model_without_an_answer_delays_for_a_bounded_time(
    model: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_check, "SECONDS", 0.2)
    model.follow(lambda _: Fault("hang"))
    (said,) = checked(model)
    assert "no answer within 0.2 s; continuing" in said


def test_where_workers_may_have_another_key_only_the_own_one_is_tried(model: ModelServer) -> None:
    environment = {"OPENAI_BASE_URL": model.url}
    asyncio.run(check_calls([CONFIG], environment, pytest.fail, own_keys=True))
    assert model.requests == ()


@pytest.mark.parametrize("protocol", ROUTES)
def test_every_protocol_is_called_as_its_workers_call_it(model: ModelServer, protocol: Api) -> None:
    """The server refuses what its protocol does not know; the next call is that of a worker."""
    name = next(name for name, service in SERVICES.items() if service.api is protocol)
    environment = environment_of(model.url.removesuffix("/v1")) | {"OPENAI_API_VERSION": "2024-10"}
    config = CONFIG.model_copy(update={"model": f"{name}:tiny"})
    model.follow(lambda _: Reply("p"))

    asyncio.run(check_calls([config], environment, pytest.fail))
    generate_with(environment, config.model)
    checked, worked = model.requests
    same = ("authorization", "x-goog-api-key", "api-key", "anthropic-version", "content-type")
    assert {name: checked.headers.get(name) for name in same} == {
        name: worked.headers.get(name) for name in same
    }
    assert model.violations == ()

    model.follow(lambda _: Fault("unauthorized"))
    with pytest.raises(ConfigurationError, match=f"Fix: set {SERVICES[name].key_variables[0]}"):
        asyncio.run(check_calls([config], environment, pytest.fail))


def generate_with(environment: dict[str, str], model: str) -> None:
    async def call() -> None:
        models = Models(environment=environment)
        await models.generate(ModelRequest(model=model, messages=(Message.user("hi"),)))
        await models.aclose()

    asyncio.run(call())


def test_keys_go_where_workers_send_them() -> None:
    def sent(environment: dict[str, str], **settings: Any) -> tuple[bool, str]:
        config = CONFIG.model_copy(update={"settings": ModelSettings(**settings)})
        probe = probe_of(config, environment)
        assert probe is not None
        return probe.endpoint.key == KEY, list(probe.body)[-1]

    known = {"OPENAI_API_KEY": KEY, "MINE": KEY}
    assert sent(known) == (True, "max_completion_tokens")
    assert sent(known, base_url="https://other.example/v1") == (False, "max_tokens")
    assert sent(known, base_url="https://other.example/v1", api_key_env="MINE")[0]
    own = {**known, "OPENAI_BASE_URL": "https://other.example/v1"}
    assert sent(own, base_url="https://other.example/v1/")[0]


def test_models_of_others_are_not_called() -> None:
    assert probe_of(CONFIG.model_copy(update={"model": "own:tiny"}), {}) is None
    assert probe_of(CONFIG.model_copy(update={"name": PLAIN_AGENT}), {}) is None


@pytest.mark.parametrize(
    ("environment", "part"),
    [
        ({}, "set the variable OPENAI_API_KEY"),
        ({"OPENAI_API_KEY": "no\nheader"}, "OPENAI_API_KEY has characters"),
        ({"OPENAI_API_KEY": KEY, "STEPFLEET_ALLOW_MODEL_REQUESTS": "0"}, "is not allowed"),
    ],
)
def test_what_no_worker_can_call_is_refused_but_where_workers_may_differ(
    environment: dict[str, str], part: str
) -> None:
    with pytest.raises(ConfigurationError, match=part) as refused:
        asyncio.run(check_calls([CONFIG], environment, pytest.fail))
    assert "agent 'solver'" in refused.value.message
    asyncio.run(check_calls([CONFIG], environment, pytest.fail, own_keys=True))


@pytest.mark.parametrize(
    ("status", "text", "part"),
    [
        (400, "API key not valid. Please pass a valid API key.", "valid key"),
        (400, "The model `x` does not exist", "correct the agent's model"),
        (429, "insufficient quota", "add credit"),
        (402, "Payment Required", "add credit"),
        (302, "", "the address"),
        (405, "Method not allowed", "the address"),
        (400, "Unsupported parameter: 'max_tokens'", None),
        (422, "messages: too short", None),
        (429, "Rate limit reached", None),
        (500, "model overloaded", None),
        (400, "maximum context length is 1 token", None),
    ],
)
def test_the_fix_names_what_is_wrong(status: int, text: str, part: str | None) -> None:
    probe = probe_of(CONFIG, {"OPENAI_API_KEY": KEY})
    assert probe is not None
    error = refusal(status, {}, text.encode(), host="h", key=None, now=NOW, variable=None)
    fix = fix_of(probe, status, error)
    assert (fix is None) if part is None else (fix is not None and part in fix)
