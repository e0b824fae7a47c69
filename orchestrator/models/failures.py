"""Translates the errors of services into the exception tree. Pure.

Services distinguish failures by `code`, `type` or `status`. Compatible servers use codes of their
own, repeat the status there, or give the reason in the message alone. Codes win over the status;
the message counts only where both leave the matter open. The code then decides what is transient.
Messages are bounded and never contain the key.
"""

import email.utils
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import orjson

from stepfleet.orchestrator.errors import (
    ContextWindowError,
    ModelError,
    RateLimitError,
    bounded_wish,
)
from stepfleet.orchestrator.models.rate_headers import seconds_until, stated_in_refusal
from stepfleet.orchestrator.records.errors import PERMANENT, ModelErrorCode

_BOM = b"\xef\xbb\xbf"
_LONGEST_MESSAGE = 600
_MOST_WRAPPERS = 4
"""Errors within errors that are looked into."""
_WORDS = ("message", "Message", "msg", "detail", "status_msg", "error_message", "error_msg")
"""Fields that have the words of an error."""
_SUCCESSES = {"0", "200"}
"""Codes that say that nothing failed."""
_LARGEST_CODE = 10**9
_SHORTEST_KEY = 8
_LONGEST_DATE = 100
_LOOKS_LIKE_A_KEY = re.compile(
    r"\b(?:sk|gsk|pk|rk)-[A-Za-z0-9_*-]{6,}|\bAIza[A-Za-z0-9_-]{8,}|Bearer \S+"
    r"|\b(?:AKIA|ASIA|ABSK)[A-Za-z0-9+/=]{12,}|(?<=x-amz-security-token:)\S+"
)


def redact(text: str, key: str | None) -> str:
    """Return `text` without the key or what looks like one, cut to a bounded length."""
    if key and len(key) >= _SHORTEST_KEY:  # local servers take any word for one
        text = text.replace(key, "[key]")
    text = text[: 8 * _LONGEST_MESSAGE]  # a foreign text may have megabytes
    text = _LOOKS_LIKE_A_KEY.sub("[key]", text)
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + " [cut]"


def retry_after(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the seconds that the provider asks to wait: milliseconds, seconds, or until a moment.

    A moment is an HTTP date or the time since 1970. An hour at most; None for no wish, and for what
    is none.
    """
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        if (number := _number(headers.get(name))) is not None:
            return bounded_wish(seconds_until(number, now, unit))
    if (text := headers.get("retry-after")) is None:
        return None
    try:
        moment = email.utils.parsedate_to_datetime(text[:_LONGEST_DATE])
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return bounded_wish((moment - now).total_seconds())
    except (ValueError, TypeError, IndexError, OverflowError):  # whatever the parser makes of it
        return None


def _number(text: str | None) -> float | None:
    try:
        value = float(text[:_LONGEST_DATE]) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and math.isfinite(value) else None


_SERVER_ERRORS, _LAST_STATUS = 500, 599
_CODES = {
    ModelErrorCode.QUOTA_EXHAUSTED: "insufficient_quota insufficient_user_quota"
    " insufficient_balance insufficient_credits exceeded_current_quota_error billing_error"
    " billing_hard_limit_reached billing_not_active budget_exceeded payment_required"
    " arrearage accountoverdueerror",
    ModelErrorCode.CONTENT_FILTER: "content_filter content_filtered content_policy_violation"
    " data_inspection_failed responsibleaipolicyviolation image_content_policy_violation"
    " datainspectionfailed moderation_blocked",
    ModelErrorCode.MODEL_NOT_FOUND: "model_not_found model_not_found_error model_not_available"
    " model_decommissioned invalid_model deploymentnotfound notfounderror not_found_error",
    ModelErrorCode.PERMISSION_DENIED: "access_denied key_model_access_denied"
    " team_model_access_denied permission_denied permission_error request_forbidden"
    " unsupported_country_region_territory",
    ModelErrorCode.INVALID_API_KEY: "auth_error authentication_error expired_key invalid_api_key"
    " invalid_authentication_error unauthenticated unauthorized unrecognizedclientexception"
    " expiredtokenexception expiredtoken invalidsignatureexception incompletesignatureexception"
    " invalidclienttokenid missingauthenticationtokenexception signaturedoesnotmatch"
    " missingauthenticationtoken incompletesignature",
    ModelErrorCode.INVALID_REQUEST: "not_supported_error invalid_prompt invalid_image"
    " invalid_image_format invalid_image_mode invalid_image_url invalid_base64_image"
    " image_too_large image_too_small image_parse_error image_file_too_large empty_image_file"
    " unsupported_image_media_type image_file_not_found",
    ModelErrorCode.RATE_LIMIT: "servicequotaexceededexception throttlingexception"
    " capacity_exceeded",
    ModelErrorCode.SERVER_ERROR: "modelnotreadyexception modelerrorexception"
    " modelstreamerrorexception",
    # The model wrote what its server could not read: the next answer usually can be.
    ModelErrorCode.MALFORMED_ANSWER: "tool_use_failed json_validate_failed output_parse_failed",
}
_SHEDS = frozenset({"resource_unavailable", "capacity_exceeded"})
"""Codes that say that a cheaper tier has no capacity now: OpenAI's 429, Groq's 498."""
_WORDS_BY_CODE = {code: frozenset(words.split()) for code, words in _CODES.items()}
_STATUSES: dict[int, ModelErrorCode] = {
    HTTPStatus.UNAUTHORIZED: ModelErrorCode.INVALID_API_KEY,
    HTTPStatus.PAYMENT_REQUIRED: ModelErrorCode.QUOTA_EXHAUSTED,
    HTTPStatus.FORBIDDEN: ModelErrorCode.PERMISSION_DENIED,
    HTTPStatus.NOT_FOUND: ModelErrorCode.MODEL_NOT_FOUND,
    HTTPStatus.REQUEST_TIMEOUT: ModelErrorCode.TIMEOUT,
    HTTPStatus.CONFLICT: ModelErrorCode.SERVER_ERROR,
    HTTPStatus.MISDIRECTED_REQUEST: ModelErrorCode.SERVER_ERROR,
    HTTPStatus.FAILED_DEPENDENCY: ModelErrorCode.SERVER_ERROR,
    HTTPStatus.TOO_EARLY: ModelErrorCode.SERVER_ERROR,
    # Proxies and Google: the connection was closed while the server was at work.
    444: ModelErrorCode.SERVER_ERROR,
    460: ModelErrorCode.SERVER_ERROR,
    499: ModelErrorCode.SERVER_ERROR,
    HTTPStatus.TOO_MANY_REQUESTS: ModelErrorCode.RATE_LIMIT,
    HTTPStatus.GATEWAY_TIMEOUT: ModelErrorCode.TIMEOUT,
}
_MESSAGES = {
    ModelErrorCode.QUOTA_EXHAUSTED: r"insufficient (?:balance|credits?|funds|quota)"
    r"|credit balance is too low|budget has been exceeded|reached your specified api usage limits"
    r"|spend(?:ing)? (?:limit|cap)|used all available credits|not have any credits"
    r"|doesn't have any credits|\bkey limit exceeded|balance is insufficient"
    r"|余额不足|额度不足|欠费",
    ModelErrorCode.PERMISSION_DENIED: r"user location is not supported",
    ModelErrorCode.CONTENT_FILTER: r"content (?:filtering|management) policy"
    r"|content exists risk|content violates|(?:prompt|input|request) was flagged"
    r"|(?:inappropriate|sensitive|unsafe) content|considered high risk|our safety system"
    r"|不安全或敏感内容",
    ModelErrorCode.INVALID_API_KEY: r"api[ _-]?key (?:is )?(?:not valid|invalid|expired)"
    r"|(?:invalid|incorrect) api[ _-]?key|your api key is valid|bearer token has expired"
    r"|security token included in the request is (?:invalid|expired)",
    ModelErrorCode.MODEL_NOT_FOUND: r"\bmodel\b.{0,120}?\b(?:does not exist|not found)"
    r"|is not a valid model|invalid model name|no such model|model identifier is invalid",
    ModelErrorCode.RATE_LIMIT: r"rate limit (?:is |was |has been )?(?:exceeded|reached)"
    r"|too many requests|too many tokens.{0,40}please wait",
}
_PATTERNS = {code: re.compile(text, re.IGNORECASE) for code, text in _MESSAGES.items()}
_VAGUE = frozenset(
    {
        None,
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.PRECONDITION_FAILED,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.TOO_MANY_REQUESTS,
    }
)
"""Statuses that leave the reason to the message."""

_TOO_LONG_CODES = {
    "context_length_exceeded",
    "exceed_context_size_error",
    "model_context_window_exceeded",
    "string_too_long",
    "tokens_limit_reached",
}
_TOO_LONG_STATUSES = {
    None,
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
}
_TOO_LONG = re.compile(
    r"context[_ ]length|context ?window|context size|maximum context|too many (?:input )?tokens"
    r"|(?:prompt|input)(?: tokens?| length)?(?: is)? too long|input tokens? (?:count|exceed)"
    r"|exceeds? (?:the )?context limit|number of input tokens exceeds"
    r"|max(?:imum)? (?:prompt|input|model) (?:length|characters)|prompt exceeds max"
    r"|exceeds? (?:the )?maximum allowed (?:input |token )?(?:length|size)"
    r"|exceeded model token limit|prompt token count|max_(?:seq|model|input)_len\b"
    r"|reduce the length of the (?:messages|prompt|input)|range of input length"  # the latter: Qwen
    r"|`inputs` (?:tokens \+ `max_new_tokens` )?must (?:be|have)"  # TGI
    r"|prompt ?超长|长度超过",
    re.IGNORECASE,
)
_LIMIT = re.compile(
    r"(?:context (?:length|window|size)|maximum(?: allowed)?(?: (?:prompt|input|model|token))?"
    r"(?: length| size)?|limit|max_(?:seq|model|input)_len|max size)"
    r"(?: is(?: only)?| of|:)? ?\(?(\d[\d,]*)"
    r"|(?:>|with) (\d[\d,]*) maximum|supports up to (\d+)|limit of (\d[\d,]*)"
    r"|tokens allowed \((\d[\d,]*)\)"
    r"|must be <= (\d+)|less than (\d+) tokens|length should be \[\d+, ?(\d+)\]",
    re.IGNORECASE,
)
_SOME_VARIABLE = "of the key"
_HINTS = {
    ModelErrorCode.INVALID_API_KEY: "check the variable {variable} on the workers",
    ModelErrorCode.PERMISSION_DENIED: "check what the key may use",
    ModelErrorCode.MODEL_NOT_FOUND: "check the agent's model and settings.base_url",
}


def refusal(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    host: str,
    key: str | None,
    now: datetime,
    variable: str | None = _SOME_VARIABLE,
) -> ModelError:
    """Return the failure of an answer with `status` (not 2xx).

    `now` turns a Retry-After date into seconds; `key` is cut out of the provider's message.
    `variable` is the one that should have the key; None leaves out what to check on workers.
    """
    error = _error_of(body)
    if named := headers.get("x-amzn-errortype"):  # the name may have an address behind it
        error = {**error, "type": named.partition(":")[0]}
    message = redact(error.get("message") or f"status {status}", key)
    text = _answered(
        host, status, message, variable, _code_of(status, _words_of(error), error, message)
    )
    wait = retry_after(headers, now)
    return _failure(
        status, error, message, text, _retry_delay(error, now) if wait is None else wait
    )


def stated_failure(payload: dict[str, Any], answer: str) -> dict[str, Any] | None:
    """Return the payload of a 200 answer if it states a failure, None where it does not.

    An answer has the field `answer`; words of an error with it are not looked for, an `error` is.
    """
    if payload.get("error"):
        return payload
    if payload.get(answer):
        return None
    error = _as_error(payload)
    code = error.get("code")
    has_failed = not (_is_word(code) and str(code) in _SUCCESSES)
    return payload if error.get("message") and has_failed else None


def failed_event(payload: dict[str, Any], *, host: str, key: str | None) -> ModelError:
    """Return the failure of an error inside a 200 answer or a stream."""
    error = _as_error(payload)
    message = redact(error.get("message") or "an error without a message", key)
    named = (_status_of(error.get(name)) for name in ("code", "status", "status_code"))
    status = next((one for one in named if one is not None), None)
    text = (
        f"{host} failed: {message}"
        if status is None
        else _answered(
            host,
            status,
            message,
            _SOME_VARIABLE,
            _code_of(status, _words_of(error), error, message),
        )
    )
    return _failure(status, error, message, text, None)


def _failure(
    status: int | None, error: dict[str, Any], message: str, text: str, wait: float | None
) -> ModelError:
    words = _words_of(error)
    code = _code_of(status, words, error, message)
    if words & _TOO_LONG_CODES or (
        code is not ModelErrorCode.RATE_LIMIT
        and status in _TOO_LONG_STATUSES
        and _TOO_LONG.search(message)
    ):
        return ContextWindowError(text, limit=_window(error, message))
    if code is ModelErrorCode.RATE_LIMIT:
        if status is not None and message.startswith("Request too large"):
            return ModelError(text, code=ModelErrorCode.INVALID_REQUEST)
        error_of_rate = RateLimitError(text, retry_after=wait)
        error_of_rate.sheds = bool(words & _SHEDS)
        error_of_rate.stated = stated_in_refusal(message, error)
        return error_of_rate
    if code in PERMANENT:
        return ModelError(text, code=code)
    received = 0 if code is ModelErrorCode.MALFORMED_ANSWER else None  # the model was at work
    return ModelError(text, retryable=True, retry_after=wait, code=code, received=received)


def _answered(
    host: str,
    status: int,
    message: str,
    variable: str | None,
    code: ModelErrorCode,
) -> str:
    if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return f"{host} redirects ({status}): set settings.base_url to the final address"
    hint = _HINTS.get(code, "") if variable else ""
    shown = f" ({hint.format(variable=variable)})" if hint else ""
    return f"{host} answered {status}: {message}{shown}"


def _code_of(
    status: int | None, words: frozenset[str], error: Mapping[str, Any], message: str
) -> ModelErrorCode:
    if status is None and any("rate_limit" in one for one in words):
        return ModelErrorCode.RATE_LIMIT
    named = next((code for code, known in _WORDS_BY_CODE.items() if words & known), None)
    if named not in (None, ModelErrorCode.INVALID_REQUEST):  # a bad request may say why
        return named
    metadata = error.get("metadata")
    if isinstance(metadata, Mapping) and ("flagged_input" in metadata or "reasons" in metadata):
        return ModelErrorCode.CONTENT_FILTER
    if status in _VAGUE:
        for code, pattern in _PATTERNS.items():
            if pattern.search(message):
                return code
    return named or _by_status(status, words)


def _by_status(status: int | None, words: frozenset[str]) -> ModelErrorCode:
    if status in _STATUSES:
        return _STATUSES[status]
    refused = "invalid_request_error" in words if status is None else status < _SERVER_ERRORS
    return ModelErrorCode.INVALID_REQUEST if refused else ModelErrorCode.SERVER_ERROR


def _words_of(error: Mapping[str, Any]) -> frozenset[str]:
    """Return the codes that an error body names, in small letters."""
    inner = error.get("innererror")
    named = [error.get("code"), error.get("type"), error.get("status")]
    if isinstance(inner, Mapping):
        named.append(inner.get("code"))
    return frozenset(str(one).lower() for one in named if _is_word(one))


def _is_word(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and abs(value) < _LARGEST_CODE)


def _status_of(code: Any) -> int | None:
    """Return the HTTP status that a code is; some servers send it as text."""
    if isinstance(code, str) and code.isascii() and code.isdigit() and len(code) == 3:  # noqa: PLR2004 - digits of a status
        code = int(code)
    is_status = isinstance(code, int) and HTTPStatus.BAD_REQUEST <= code <= _LAST_STATUS
    return code if is_status else None


def _error_of(body: bytes) -> dict[str, Any]:
    """Return the error in a body: OpenAI's form, a bare one, a list of one, or plain text."""
    body = body.removeprefix(_BOM).strip()
    if body.startswith((b"data:", b"event:")):  # the one event of a stream
        body = body.partition(b"data:")[2].partition(b"\n")[0]
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {"message": body.decode(errors="replace").strip()}
    if isinstance(payload, list) and payload:
        payload = payload[0]
    if not isinstance(payload, dict):
        return {"message": _text(payload)}
    return _as_error(payload)


def _as_error(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the error that a payload states, with `message` as text."""
    for name in ("error", "base_resp"):  # the latter is MiniMax's
        inner = payload.get(name)
        for _ in range(_MOST_WRAPPERS):
            if not (isinstance(inner, dict) and inner.get("error")):
                break
            inner = {**inner, "message": _said_in(inner), "error": None} | _inner(inner["error"])
        if isinstance(inner, dict):
            return {**inner, "message": _said_in(inner)}
    errors = payload.get("errors")  # Cloudflare's
    if isinstance(errors, list) and errors and errors[0] and not payload.get("error"):
        inner = _inner(errors[0])
        return {**inner, "message": _said_in(inner)}
    kind = payload.get("__type")  # AWS's, with a namespace before it
    named = {"type": kind.rpartition("#")[2]} if isinstance(kind, str) else {}
    said = _text(payload.get("error"))
    words = _said_in(payload)
    both = said and words and said not in words
    return {**payload, "message": f"{said}: {words}" if both else words or said, **named}


def _inner(error: Any) -> dict[str, Any]:
    return error if isinstance(error, dict) else {"message": _text(error)}


def _said_in(error: dict[str, Any]) -> str:
    """Return what an error says, with what it adds about the failure of a server behind it."""
    found = (_text(error.get(name)) for name in _WORDS)
    message = next(filter(None, found), "")
    metadata = error.get("metadata")
    raw = metadata.get("raw") if isinstance(metadata, dict) else None  # OpenRouter's
    added = _text(error.get("failed_generation") or raw)  # the former is Groq's
    return f"{message}: {added}" if message and added and added not in message else message


def _text(value: Any) -> str:
    """Return words as they are, and other values as JSON; both cut to what a message may have."""
    if value is None or value is False:
        return ""
    if isinstance(value, str):
        return value[: 8 * _LONGEST_MESSAGE]
    try:
        return orjson.dumps(value).decode()[: 8 * _LONGEST_MESSAGE]
    except TypeError:  # nested too deep, or not JSON
        return ""


def _retry_delay(error: dict[str, Any], now: datetime) -> float | None:
    """Return the seconds in a `RetryInfo` of Google's error details."""
    details = error.get("details")
    for one in details if isinstance(details, list) else ():
        if isinstance(one, dict) and isinstance(delay := one.get("retryDelay"), str):
            number = _number(delay.removesuffix("s"))
            return None if number is None else bounded_wish(seconds_until(number, now))
    return None


def _window(error: dict[str, Any], message: str) -> int | None:
    if isinstance(window := error.get("n_ctx"), int):
        return window
    found = _LIMIT.search(message)
    digits = next((group for group in found.groups() if group), None) if found else None
    return int(digits.replace(",", "")) if digits else None
