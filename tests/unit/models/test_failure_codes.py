"""What OpenAI and the servers that follow it say of a failure, and the code that it gets."""

from datetime import UTC, datetime
from typing import Any

import orjson
import pytest

from stepfleet.orchestrator import ErrorType, ModelErrorCode
from stepfleet.orchestrator.errors import ModelError, RateLimitError
from stepfleet.orchestrator.models.failures import failed_event, refusal
from stepfleet.orchestrator.records.errors import ErrorContext

C = ModelErrorCode
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def refuse(status: int, body: Any) -> ModelError:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    return refusal(status, {}, data, host="api.test", key=None, now=NOW)


def error(message: str = "no", **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, **fields}}


BODIES: dict[str, tuple[int, Any, ModelErrorCode]] = {
    # OpenAI and Azure
    "a key": (401, error("Incorrect API key provided", code="invalid_api_key"), C.INVALID_API_KEY),
    "a country": (403, error(code="unsupported_country_region_territory"), C.PERMISSION_DENIED),
    "a model": (404, error("The model `x` does not exist", code="model_not_found"),
                C.MODEL_NOT_FOUND),
    "a deployment": (404, error(code="DeploymentNotFound"), C.MODEL_NOT_FOUND),
    "a quota": (429, error("pay", type="insufficient_quota"), C.QUOTA_EXHAUSTED),
    "a limit": (429, error("slow", code="rate_limit_exceeded"), C.RATE_LIMIT),
    "a filter": (400, error("no", code="content_filter",
                            innererror={"code": "ResponsibleAIPolicyViolation"}), C.CONTENT_FILTER),
    "a filter within": (400, error("no", code=None, innererror={
        "code": "ResponsibleAIPolicyViolation"}), C.CONTENT_FILTER),
    "a field": (400, error("Unrecognized request argument", type="invalid_request_error"),
                C.INVALID_REQUEST),
    "trouble": (500, error("oops", type="server_error"), C.SERVER_ERROR),
    # vLLM
    "vllm: a model": (404, {"object": "error", "message": "The model `x` does not exist.",
                            "type": "NotFoundError", "code": 404}, C.MODEL_NOT_FOUND),
    "vllm: a key": (401, {"error": "Unauthorized"}, C.INVALID_API_KEY),
    "vllm: a size": (400, {"object": "error", "type": "BadRequestError", "code": 400,
                           "message": "This model's maximum context length is 4096 tokens."},
                     C.CONTEXT_OVERFLOW),
    # Ollama
    "ollama: a model": (404, error('model "x" not found, try pulling it first', type="api_error"),
                        C.MODEL_NOT_FOUND),
    "ollama: tools": (400, error("x does not support tools", type="api_error"), C.INVALID_REQUEST),
    # llama.cpp
    "llama.cpp: a key": (401, error("Invalid API Key", type="authentication_error", code=401),
                         C.INVALID_API_KEY),
    "llama.cpp: loading": (503, error("Loading model", type="unavailable_error", code=503),
                           C.SERVER_ERROR),
    "llama.cpp: a size": (400, error("too big", type="exceed_context_size_error", n_ctx=512),
                          C.CONTEXT_OVERFLOW),
    "llama.cpp: no such thing": (501, error("no embeddings", type="not_supported_error"),
                                 C.INVALID_REQUEST),
    # LiteLLM
    "litellm: a key": (401, error("Authentication Error", type="auth_error", code="401"),
                       C.INVALID_API_KEY),
    "litellm: a budget": (400, error("Budget has been exceeded! Current cost: 2, Max budget: 1",
                                     type="budget_exceeded", code="400"), C.QUOTA_EXHAUSTED),
    "litellm: a model": (400, error("Invalid model name passed in model=x", code="400"),
                         C.MODEL_NOT_FOUND),
    "litellm: access": (401, error("key not allowed to access model",
                                   type="key_model_access_denied", code="401"),
                        C.PERMISSION_DENIED),
    "litellm: a size": (400, error("litellm.ContextWindowExceededError: maximum context length is "
                                   "128 tokens", code="400"), C.CONTEXT_OVERFLOW),
    # OpenRouter
    "openrouter: credits": (402, error("Insufficient credits", code=402), C.QUOTA_EXHAUSTED),
    "openrouter: flagged": (403, error("flagged", code=403, metadata={
        "reasons": ["violence"], "flagged_input": "..."}), C.CONTENT_FILTER),
    "openrouter: a model": (400, error("x/y is not a valid model ID", code=400),
                            C.MODEL_NOT_FOUND),
    "openrouter: a provider": (502, error("down", code=502), C.SERVER_ERROR),
    "openrouter: flagged in words": (403, error('Your input was flagged for "violence".', code=403),
                                     C.CONTENT_FILTER),
    "openrouter: a key's limit": (403, error("Key limit exceeded (daily limit). Manage it using "
                                             "https://openrouter.ai/settings/keys", code=403),
                                  C.QUOTA_EXHAUSTED),
    "openrouter: calls of a day": (429, error(
        "Rate limit exceeded: free-models-per-day. Add 10 credits to unlock 1000 free model "
        "requests per day", code=429), C.RATE_LIMIT),
    # xAI
    "xai: content": (403, {"code": "permission-denied",
                           "error": "Content violates usage guidelines. "}, C.CONTENT_FILTER),
    "xai: a size": (400, {"code": "Client specified an invalid argument",
                          "error": "This model's maximum prompt length is 131072 but the request "
                                   "contains 200000 tokens."}, C.CONTEXT_OVERFLOW),
    "xai: a key": (400, {"code": "Client specified an invalid argument",
                         "error": "Incorrect API key provided: xa***cd."}, C.INVALID_API_KEY),
    "xai: money": (429, {"code": "Some resource has been exhausted",
                         "error": "Your team x has either used all available credits or reached "
                                  "its monthly spending limit."}, C.QUOTA_EXHAUSTED),
    "xai: no money yet": (403, {
        "code": "The caller does not have permission to execute the specified operation",
        "error": "Your newly created team doesn't have any credits or licenses yet."},
        C.QUOTA_EXHAUSTED),
    # TGI
    "tgi: it broke": (424, {"error": "Request failed during generation: Server error: CUDA out of "
                                     "memory", "error_type": "generation"}, C.SERVER_ERROR),
    "tgi: too busy": (429, {"error": "Model is overloaded", "error_type": "overloaded"},
                      C.RATE_LIMIT),
    # others
    "openai: a prompt": (400, error(
        "Invalid prompt: your prompt was flagged as potentially violating our usage policy.",
        type="invalid_request_error", code="invalid_prompt"), C.CONTENT_FILTER),
    "openai: a malformed prompt": (400, error("Invalid Responses API request",
                                              code="invalid_prompt"), C.INVALID_REQUEST),
    "openai: a picture": (400, error("rejected by our safety system",
                                     code="moderation_blocked"), C.CONTENT_FILTER),
    "deepseek: content": (400, error("Content Exists Risk", type="invalid_request_error",
                                     code="invalid_request_error"), C.CONTENT_FILTER),
    "zhipu: content": (400, error("系统检测到输入或生成内容可能包含不安全或敏感内容", code="1301"),
                       C.CONTENT_FILTER),
    "zhipu: money in Chinese": (429, error("余额不足或无可用资源包,请充值。", code="1113"),
                                C.QUOTA_EXHAUSTED),
    "qwen: money": (400, error("Access denied, please make sure your account is in good standing.",
                               code="Arrearage"), C.QUOTA_EXHAUSTED),
    "fireworks: money": (412, {"error": "Account x is suspended, possibly due to reaching the "
                                        "monthly spending limit"}, C.QUOTA_EXHAUSTED),
    "gemini: a spend cap": (429, error("Your project has exceeded its monthly spending cap",
                                       status="RESOURCE_EXHAUSTED"), C.QUOTA_EXHAUSTED),
    "groq: a tier": (498, error("Flex tier capacity exceeded", type="invalid_request_error",
                                code="capacity_exceeded"), C.RATE_LIMIT),
    "gemini: a key": (400, [error("API key not valid. Please pass a valid API key.", code=400,
                                  status="INVALID_ARGUMENT")], C.INVALID_API_KEY),
    "gemini: a limit": (429, [error("You exceeded your current quota", code=429,
                                    status="RESOURCE_EXHAUSTED")], C.RATE_LIMIT),
    "anthropic: money": (400, error("Your credit balance is too low",
                                    type="invalid_request_error"), C.QUOTA_EXHAUSTED),
    "anthropic: a limit of money": (400, error(
        "You have reached your specified API usage limits. You will regain access on 2026-02-01 at "
        "00:00 UTC.", type="invalid_request_error"), C.QUOTA_EXHAUSTED),
    "gemini: a place": (400, error("User location is not supported for the API use.", code=400,
                                   status="FAILED_PRECONDITION"), C.PERMISSION_DENIED),
    "gemini: broken off": (499, error("The operation was cancelled.", code=499, status="CANCELLED"),
                           C.SERVER_ERROR),
    "deepseek: money": (402, error("Insufficient Balance"), C.QUOTA_EXHAUSTED),
    "zhipu: money": (429, error("Insufficient balance", code="1113"), C.QUOTA_EXHAUSTED),
    "groq: a call": (400, error("Failed to call a function.", type="invalid_request_error",
                                code="tool_use_failed", failed_generation="<function=x>"),
                     C.MALFORMED_ANSWER),
    "groq: json": (400, error("Failed to validate JSON.", type="invalid_request_error",
                              code="json_validate_failed"), C.MALFORMED_ANSWER),
    "groq: its own format": (400, error("Parsing failed.", code="output_parse_failed"),
                             C.MALFORMED_ANSWER),
    "bedrock: a limit": (400, {"__type": "ThrottlingException",
                               "message": "Too many tokens, please wait before trying again."},
                         C.RATE_LIMIT),
    "bedrock: a limit in words": (400, {"message": "Too many tokens per day, please wait before "
                                                   "trying again."}, C.RATE_LIMIT),
    "bedrock: a size": (400, {"__type": "ValidationException", "message": "Too many input tokens"},
                        C.CONTEXT_OVERFLOW),
    "code and msg": (429, {"code": 1302, "msg": "slow down"}, C.RATE_LIMIT),
    "minimax: money": (429, {"base_resp": {"status_code": 1008,
                                           "status_msg": "insufficient balance"}},
                       C.QUOTA_EXHAUSTED),
    "an event": (400, b'event: error\ndata: {"error": {"code": "invalid_api_key"}}\n\n',
                 C.INVALID_API_KEY),
    "a proxy": (504, b"<html>gateway timeout</html>", C.TIMEOUT),
    "a wrong address": (404, {"detail": "Not Found"}, C.MODEL_NOT_FOUND),
}  # fmt: skip
PASSING = {C.RATE_LIMIT, C.SERVER_ERROR, C.TIMEOUT, C.MALFORMED_ANSWER}


@pytest.mark.parametrize("case", BODIES)
def test_a_refusal_has_the_code_of_its_kind(case: str) -> None:
    """LLM-06: one vocabulary, whatever words the server has; and what may pass is retried."""
    status, body, code = BODIES[case]
    failure = refuse(status, body)
    assert failure.code == code
    assert failure.retryable is (code in PASSING)
    assert isinstance(failure, RateLimitError) is (code is C.RATE_LIMIT)
    assert failure.to_info().permanent is (code not in PASSING)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"code": "401"}, C.INVALID_API_KEY),
        ({"code": 402}, C.QUOTA_EXHAUSTED),
        ({"code": "insufficient_quota"}, C.QUOTA_EXHAUSTED),
        ({"type": "authentication_error"}, C.INVALID_API_KEY),
        ({"type": "invalid_request_error"}, C.INVALID_REQUEST),
        ({"code": "context_length_exceeded"}, C.CONTEXT_OVERFLOW),
        ({"type": "server_error"}, C.SERVER_ERROR),
        ({"code": "xyz"}, C.SERVER_ERROR),
    ],
)
def test_an_error_inside_an_answer_has_the_same_codes(
    fields: dict[str, Any], code: ModelErrorCode
) -> None:
    """LLM-06"""
    assert failed_event(error("inside", **fields), host="h", key=None).code == code


def test_only_model_failures_are_permanent() -> None:
    """ERR-11: a tool may fail with a code of the same name, and be retried."""
    for error_type in ErrorType:
        failures = ErrorContext(
            type=error_type, consecutive_failures=1, metadata={"code": "CONFIG_ERROR"}
        )
        assert failures.permanent is (error_type is ErrorType.MODEL)
