"""Which model of a list answers, what of the others is kept, and what the step's failure is."""

import asyncio
from typing import Any

import pytest

from stepfleet.orchestrator import Agent, LLMResponse, Message, ModelRequest
from stepfleet.orchestrator.agents.config import merged_overrides, stored_overrides
from stepfleet.orchestrator.errors import (
    ConfigurationError,
    ContextWindowError,
    ModelError,
    ModelTimeoutError,
    RateLimitError,
)
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.worker.attempt.fallback import first_answer, pruned

LIST = ("vllm:a", "groq:b")
LONG = (
    Message.user("first"),
    Message.assistant("middle " * 100),
    Message.user("second"),
    Message.assistant("near " * 100),
    Message.user("last"),
)


def out(code: ModelErrorCode = ModelErrorCode.SERVER_ERROR) -> ModelError:
    """Return the failure of a service in trouble."""
    return ModelError("in trouble", retryable=True, code=code)


def permanent(code: ModelErrorCode) -> ModelError:
    return ModelError("refused", code=code)


def answer(*given: Exception | str, models: tuple[str, ...] = LIST) -> tuple[Any, list[str]]:
    """Return the answer of a list whose calls end like that, and the models that were called."""
    called, left = [], list(given)

    async def ask(request: ModelRequest) -> LLMResponse:
        called.append(f"{request.model}/{len(request.messages)}")
        end = left.pop(0)
        if isinstance(end, Exception):
            raise end
        return LLMResponse(content=end)

    request = ModelRequest(model=models[0], messages=LONG)
    try:
        return asyncio.run(first_answer(request, models, ask, pruned))[0], called
    except ModelError as error:
        return error, called


@pytest.mark.parametrize(
    "failure",
    [
        out(),
        out(ModelErrorCode.CONNECTION_ERROR),
        ModelTimeoutError("late"),
        ContextWindowError("too long", limit=10),
    ],
)
def test_the_next_model_answers_where_one_is_out_or_too_small(failure: ModelError) -> None:
    response, called = answer(failure, "yes")
    assert called == ["vllm:a/5", "groq:b/5"]
    assert response.content == "yes"
    assert response.fallback.model == "groq:b"
    assert [(one.model, one.code) for one in response.fallback.failed] == [("vllm:a", failure.code)]
    assert response.fallback.failed[0].ambiguous == isinstance(failure, ModelTimeoutError)


@pytest.mark.parametrize(
    "failure",
    [
        permanent(ModelErrorCode.INVALID_API_KEY),
        permanent(ModelErrorCode.MODEL_NOT_FOUND),
        permanent(ModelErrorCode.QUOTA_EXHAUSTED),
        permanent(ModelErrorCode.CONTENT_FILTER),
        RateLimitError("slow down"),
        out(ModelErrorCode.MALFORMED_ANSWER),
    ],
)
def test_refusals_of_the_request_pass_to_no_other_model(failure: ModelError) -> None:
    assert answer(failure) == (failure, ["vllm:a/5"])


def test_a_mistake_of_the_second_model_leaves_the_step_to_be_tried_again() -> None:
    error, _ = answer(out(), permanent(ModelErrorCode.INVALID_API_KEY))
    assert error.retryable
    assert error.message == "groq:b: refused; after vllm:a: in trouble"


def test_a_conversation_that_is_too_long_for_all_is_shortened_for_the_first() -> None:
    small = ContextWindowError("too long", limit=20)
    response, called = answer(small, small, "yes")
    assert called == ["vllm:a/5", "groq:b/5", "vllm:a/2"]
    assert response.fallback.model == "vllm:a"

    response, called = answer(out(), small, "yes")
    assert called == ["vllm:a/5", "groq:b/5", "groq:b/2"]
    assert response.fallback.model == "groq:b"


def test_one_model_alone_behaves_as_ever() -> None:
    small = ContextWindowError("too long", limit=20)
    response, called = answer(small, "yes", models=("vllm:a",))
    assert (called, response.fallback) == (["vllm:a/5", "vllm:a/2"], None)


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        (["anthropic:a", "openai:b"], {"seed": 1}, "'anthropic:a': anthropic takes no 'seed'"),
        (["openai:a", "anthopic:b"], {}, "did you mean 'anthropic'"),
        (["openai:a", "anthropic:b"], {"base_url": "http://h/v1"}, "settings.base_url is of one"),
        (["openai:a", "openai:a"], {}, "'openai:a' is in the list twice"),
        (["openai:a", None], {}, "it has None"),
        ([], {}, "it has None"),
        ([f"openai:{number}" for number in range(9)], {}, "9 models; name 8 at most"),
    ],
)
def test_a_list_is_refused_with_the_model_and_the_fix(
    model: Any, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match="field 'model'") as refused:
        Agent("solver", model=model, settings=settings)
    assert says in refused.value.message


def test_the_list_is_part_of_the_configuration_and_a_single_model_is_stored_as_ever() -> None:
    one, two = Agent("a", model="vllm:a").config, Agent("a", model=list(LIST)).config
    assert one.to_json() == '{"name":"a","model":"vllm:a"}'
    assert two.models == LIST
    assert two.digest not in (one.digest, Agent("a", model=["vllm:a", "groq:c"]).config.digest)


def test_a_runs_own_model_replaces_the_whole_list_and_a_list_the_model() -> None:
    listed = Agent("a", model=list(LIST)).config
    alone = stored_overrides(listed, {"model": "vllm:c"})
    assert listed.with_overrides(alone).models == ("vllm:c",)
    both = stored_overrides(listed, {"model": ["vllm:c", "vllm:d"]})
    assert listed.with_overrides(both).models == ("vllm:c", "vllm:d")
    assert listed.with_overrides(merged_overrides(both, alone)).models == ("vllm:c",)
