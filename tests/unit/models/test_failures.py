from datetime import UTC, datetime
from typing import Any

import orjson
import pytest

from stepfleet.orchestrator import ErrorType
from stepfleet.orchestrator.errors import ContextWindowError, ModelError, RateLimitError
from stepfleet.orchestrator.models.failures import failed_event, redact, refusal, retry_after

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
KEY = "my-very-secret-key"


def refuse(status: int, body: Any = b"", headers: dict[str, str] | None = None) -> ModelError:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    return refusal(
        status, headers or {}, data, host="api.test", key=KEY, now=NOW, variable="OPENAI_API_KEY"
    )


def error(message: str = "no", **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, **fields}}


@pytest.mark.parametrize(
    "status", [408, 409, 421, 424, 425, 444, 460, 499, 500, 501, 502, 503, 504, 529, 599]
)
def test_trouble_of_the_service_is_transient(status: int) -> None:
    """LLM-06: 408, 409, 425, 5xx, and what proxies say of a broken connection."""
    failure = refuse(status, b"<html>bad gateway</html>")
    assert type(failure) is ModelError
    assert failure.retryable
    assert failure.type is ErrorType.MODEL


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 405, 413, 422, 451])
def test_refusals_are_permanent_and_carry_the_providers_words(status: int) -> None:
    """LLM-06: what the request itself is to blame for."""
    failure = refuse(status, error("that is wrong"))
    assert type(failure) is ModelError
    assert not failure.retryable
    assert f"api.test answered {status}: that is wrong" in str(failure)


def test_refused_content_is_permanent() -> None:
    """LLM-06: a content policy does not change by trying again."""
    failure = refuse(400, error("policy", code="content_filter"))
    assert not failure.retryable


def test_a_429_is_a_rate_limit() -> None:
    """LLM-06: RateLimitError, with the wait that the provider asks for."""
    failure = refuse(429, error("slow down", code="rate_limit_exceeded"), {"retry-after": "7"})
    assert isinstance(failure, RateLimitError)
    assert failure.retryable
    assert failure.retry_after == 7


@pytest.mark.parametrize("where", ["code", "type"])
def test_a_429_for_want_of_money_is_permanent(where: str) -> None:
    failure = refuse(429, error("pay", **{where: "insufficient_quota"}))
    assert not isinstance(failure, RateLimitError)
    assert not failure.retryable


def test_a_429_for_a_request_that_never_fits_is_permanent() -> None:
    failure = refuse(429, error("Request too large for gpt-4o on tokens per min (TPM)"))
    assert not failure.retryable


@pytest.mark.parametrize(
    ("status", "body", "limit"),
    [
        (
            400,
            error(
                "This model's maximum context length is 128000 tokens. However, your messages "
                "resulted in 128011 tokens.",
                code="context_length_exceeded",
            ),
            128_000,
        ),
        (
            400,
            {
                "object": "error",
                "message": "This model's maximum context length is 4,096 tokens.",
                "code": 400,
            },
            4_096,
        ),
        (
            400,
            error("the request exceeds it", type="exceed_context_size_error", n_ctx=8192),
            8_192,
        ),
        (500, error("too big", type="exceed_context_size_error", n_ctx=256), 256),
        (400, error("prompt is too long: 208310 tokens > 200000 maximum"), 200_000),
        (413, error("Requested tokens (2285) exceed context window of 2048"), 2_048),
        (400, error("long", code="context_length_exceeded"), None),
    ],
)
def test_a_conversation_that_is_too_long_is_distinguished(
    status: int, body: Any, limit: int | None
) -> None:
    """LLM-06: ContextWindowError, with the window where the provider names it."""
    failure = refuse(status, body)
    assert isinstance(failure, ContextWindowError)
    assert failure.limit == limit
    assert not failure.retryable


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"plain words", "plain words"),
        (b"", "status 400"),
        (b"[]", "[]"),
        (b'[{"error": {"message": "in a list"}}]', "in a list"),
        (b'{"error": "a string"}', "a string"),
        (b'{"message": "bare"}', "bare"),
        (b'{"detail": "of a framework"}', "of a framework"),
        (b'{"detail": [{"loc": ["body", "n"], "msg": "of a field"}]}', "of a field"),
        (b'{"code": 1, "msg": "of a gateway"}', "of a gateway"),
        (b'{"base_resp": {"status_code": 2013, "status_msg": "in a frame"}}', "in a frame"),
        (b'{"error": {"error": {"message": "in another"}}}', "in another"),
        (b'{"error": "Bad Request", "message": "of a field"}', "Bad Request: of a field"),
        (b'{"error": {"message": {"reason": "in an object"}}}', "in an object"),
        (b'{"error": {"message": "m", "failed_generation": "<x>"}}', "m: <x>"),
        (b'\xef\xbb\xbf{"message": "behind a mark"}', "behind a mark"),
        (b'data: {"error": {"message": "in an event"}}\n\ndata: [DONE]\n\n', "in an event"),
        (b"data:", "status 400"),
        (b"[" * 1_000 + b"1" + b"]" * 1_000, "answered 400"),
        (b'{"error": ' + b"[" * 500 + b"]" * 500 + b"}", "status 400"),
        (b'{"error": {"message": "m", "code": ' + b"1" * 400 + b"}}", "m"),
        (b"\xff\xfe", "400"),
    ],
)
def test_errors_are_read_in_every_usual_form(body: Any, words: str) -> None:
    assert words in str(refuse(400, body))


@pytest.mark.parametrize(
    ("message", "limit"),
    [
        ("This model's maximum prompt length is 131072 but the request contains 200000", 131_072),
        ("`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens", 4_096),
        ("Input validation error: `inputs` must have less than 1024 tokens. Given: 3000", 1_024),
        ("Invalid request: Your request exceeded model token limit: 131072", 131_072),
        ("Prompt exceeds max length", None),
        ("<400> InternalError: Range of input length should be [1, 30720]", 30_720),
        ("length of prompt_tokens (147509) must be less than max_seq_len (65536).", 65_536),
        ("prompt tokens too long", None),
        ("prompt too long; exceeded max context length by 9 tokens", None),
        ("Input length (265 tokens) exceeds the maximum allowed length (262 tokens).", 262),
        ("Input length 1024 exceeds maximum allowed token size 512", 512),
        ("Input length 13139 exceeds the maximum allowed input length of 13104 tokens.", 13_104),
        ("The decoder prompt (length 50) is longer than the maximum model length of 40.", 40),
        ("Prompt length (5000) exceeds maximum input length (4096).", 4_096),
        ("the model's context length is only 202752 tokens, resulting in", 202_752),
        ("prompt token count of 5000 exceeds the limit of 4096", 4_096),
        ("Please reduce the length of the messages or completion.", None),
        ("litellm.ContextWindowExceededError: no", None),
        ("Prompt 超长", None),
        ("40 tokens, too large for model with 32 maximum context length", 32),
        ("the input token count is 32780 but model only supports up to 32767", 32_767),
        ("Input is too long for requested model.", None),
    ],
)
def test_what_servers_say_of_a_conversation_that_is_too_long(
    message: str, limit: int | None
) -> None:
    """LLM-06: each of these is a server's wording; `limit` is the window where it names it."""
    for status in (400, 422):
        failure = refuse(status, error(message))
        assert isinstance(failure, ContextWindowError)
        assert failure.limit == limit
    assert isinstance(failed_event(error(message), host="h", key=None), ContextWindowError)
    assert isinstance(refuse(429, error(message)), RateLimitError)


@pytest.mark.parametrize("code", ["tokens_limit_reached", "model_context_window_exceeded"])
def test_codes_of_a_conversation_that_is_too_long(code: str) -> None:
    failure = refuse(413, error("Request body too large. Max size: 8000 tokens.", code=code))
    assert isinstance(failure, ContextWindowError)
    assert failure.limit == 8_000


@pytest.mark.parametrize(
    ("status", "message", "hint"),
    [
        (401, "no", "(check the variable OPENAI_API_KEY on the workers)"),
        (400, "Incorrect API key provided", "(check the variable OPENAI_API_KEY on the workers)"),
        (403, "no", "(check what the key may use)"),
        (404, "no", "(check the agent's model and settings.base_url)"),
        (400, "x is not a valid model ID", "(check the agent's model and settings.base_url)"),
        (403, "Content violates usage guidelines.", "guidelines."),
        (403, "Key limit exceeded (daily limit)", "(daily limit)"),
    ],
)
def test_a_refusal_names_the_fix_of_its_cause(status: int, message: str, hint: str) -> None:
    """A 403 for the content is not mended by another key."""
    assert str(refuse(status, error(message))).endswith(hint)


def test_the_key_is_never_in_a_message() -> None:
    """LLM-06: echoed keys are cut out."""
    failure = refuse(401, error(f"Incorrect API key provided: {KEY}. Also sk-proj-abc123DEF456."))
    assert KEY not in str(failure)
    assert "abc123" not in str(failure)
    assert "OPENAI_API_KEY" in str(failure)


def test_long_messages_are_cut() -> None:
    assert len(redact("x" * 100_000, None)) < 700


def test_redirects_are_refused_with_the_fix() -> None:
    failure = refuse(307)
    assert not failure.retryable
    assert "settings.base_url" in str(failure)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "2.5"}, 2.5),
        ({"retry-after": "-3"}, 0),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "100000000000000000000"}, 3600),
        ({"retry-after": "1e306"}, 3600),
        ({"retry-after-ms": "1e308"}, 3600),
        ({"retry-after": "9" * 5000}, 3600),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, 3600),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Thu, 01 Jan 2026 12:00:30 GMT"}, 30),
        ({"retry-after": "Thu, 01 Jan 2026 11:00:00 GMT"}, 0),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "x", "retry-after": "9"}, 9),
        ({"retry-after": "1767268804"}, 4),  # the moment: seconds since 1970
        ({"retry-after": "1767268804500"}, 4.5),
        ({"retry-after-ms": "1767268804500"}, 4.5),
        ({"retry-after-ms": "1767268804"}, 4),
        ({"retry-after": "1767268804000000"}, 4),
        ({"retry-after": "1767268799"}, 0),
        ({"retry-after": "1767888888"}, 3600),
        ({"retry-after": "999999999"}, 3600),
    ],
)
def test_the_wait_is_read_from_seconds_milliseconds_and_dates(
    headers: dict[str, str], seconds: float | None
) -> None:
    """LLM-06: Retry-After in all its forms."""
    assert retry_after(headers, NOW) == seconds


@pytest.mark.parametrize("delay", ["4s", "1767268804s"])
def test_the_wait_in_googles_details_is_read_too(delay: str) -> None:
    details = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay}]
    assert refuse(429, error("slow", details=details)).retry_after == 4


@pytest.mark.parametrize(
    ("fields", "retryable"),
    [
        ({"code": 503}, True),
        ({"code": 400}, False),
        ({"code": 499, "status": "CANCELLED"}, True),
        ({"type": "server_error"}, True),
        ({"type": "invalid_request_error"}, False),
        ({"code": "insufficient_quota"}, False),
        ({}, True),
    ],
)
def test_an_error_inside_an_answer_is_judged_by_its_code(
    fields: dict[str, Any], retryable: bool
) -> None:
    failure = failed_event(error("inside", **fields), host="api.test", key=KEY)
    assert failure.retryable is retryable
    assert "inside" in str(failure)


@pytest.mark.parametrize("code", [429, "rate_limit_exceeded"])
def test_a_rate_limit_inside_an_answer_is_a_rate_limit(code: Any) -> None:
    assert isinstance(failed_event(error(code=code), host="h", key=None), RateLimitError)


def test_a_word_that_stands_for_a_key_stays_in_messages() -> None:
    """Local servers take any key: a letter is none that could be cut out."""
    body = orjson.dumps({"error": {"message": "maximum context"}})
    failure = refusal(400, {}, body, host="h", key="x", now=NOW)
    assert "maximum context" in str(failure)


@pytest.mark.parametrize(
    "text",
    [
        "Fri, 31 Dec 9999 23:59:59 -2359",
        "Thu, 01 Jan 0001 00:00:00 +2300",
        "Thu, 01 Jan 2026 12:00:30 +99999999",
        ", ,",
        "Thu, 99 Foo",
        "\ud800",
        "",
    ],
)
def test_an_odd_date_is_no_wish_or_a_bounded_one(text: str) -> None:
    assert (retry_after({"retry-after": text}, NOW) or 0) in (0, 3600)


@pytest.mark.parametrize("wish", [1e306, 10**30, float("inf")])
def test_no_wish_is_longer_than_an_hour_wherever_it_comes_from(wish: float) -> None:
    """A model of a package raises what it likes."""
    assert RateLimitError("slow", retry_after=wish).retry_after == 3600
    assert ModelError("slow", retry_after=-wish).retry_after == 0


@pytest.mark.parametrize("wish", [float("nan"), "7", None, 1j])
def test_what_is_no_number_is_no_wish(wish: Any) -> None:
    assert RateLimitError("slow", retry_after=wish).retry_after is None


@pytest.mark.parametrize(
    ("status", "code"), [(429, "resource_unavailable"), (498, "capacity_exceeded")]
)
def test_a_tier_without_capacity_is_no_limit_of_the_account(status: int, code: str) -> None:
    """LANE-03: OpenAI's and Groq's words."""
    shed = refuse(status, error("no capacity", type="invalid_request_error", code=code))
    limited = refuse(429, error("slow down", code="rate_limit_exceeded"))
    assert isinstance(shed, RateLimitError)
    assert isinstance(limited, RateLimitError)
    assert shed.sheds
    assert not limited.sheds
