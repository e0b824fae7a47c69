"""Translates refusals of an OpenAI-compatible service into the exception tree. Pure.

`openai_codes` says what kind of failure it is; the kind decides what is transient. Messages are
bounded and never contain the key.
"""

import email.utils
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import orjson

from stepfleet.orchestrator.errors import ContextWindowError, ModelError, RateLimitError
from stepfleet.orchestrator.records.errors import PERMANENT, ModelErrorCode
from stepfleet.worker.models.openai.codes import code_of, words_of

_LONGEST_MESSAGE = 600
_LAST_STATUS = 599
_TOO_LONG_CODES = {"context_length_exceeded", "exceed_context_size_error", "string_too_long"}
_TOO_LONG = re.compile(
    r"context[_ ]length|context window|context size|maximum context|prompt is too long"
    r"|input is too long|too many (?:input )?tokens",
    re.IGNORECASE,
)
_LIMIT = re.compile(
    r"(?:context (?:length|window|size)|maximum|limit)(?: is| of|:)? ?\(?(\d[\d,]*)"
    r"|> (\d[\d,]*) maximum|limit of (\d[\d,]*)",
    re.IGNORECASE,
)
_LOOKS_LIKE_A_KEY = re.compile(r"\b(?:sk|gsk|pk|rk)-[A-Za-z0-9_*-]{6,}|Bearer \S+")
_HINTS = {
    HTTPStatus.UNAUTHORIZED: "check the variable that settings.api_key_env names"
    " (OPENAI_API_KEY if it names none) on the workers",
    HTTPStatus.FORBIDDEN: "check what the key may use",
    HTTPStatus.NOT_FOUND: "check the agent's model and settings.base_url",
}


def refusal(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    host: str,
    key: str | None,
    now: datetime,
) -> ModelError:
    """Return the failure that an answer with `status` (not 2xx) amounts to.

    `now` turns a Retry-After date into seconds; `key` is cut out of the provider's message.
    """
    error = _error_of(body)
    said = redact(str(error.get("message") or f"status {status}"), key)
    hint = _HINTS.get(HTTPStatus(status)) if status in _HINTS else None
    message = f"{host} answered {status}: {said}" + (f" ({hint})" if hint else "")
    wait = retry_after(headers, now)
    if _is_too_long(status, words_of(error), said):
        return ContextWindowError(message, limit=_window(error, said))
    code = code_of(status, error, said) or ModelErrorCode.OTHER
    if code is ModelErrorCode.RATE_LIMIT:
        if said.startswith("Request too large"):
            return ModelError(message, code=ModelErrorCode.INVALID_REQUEST)
        return RateLimitError(message, retry_after=wait)
    if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        message = f"{host} redirects ({status}): set settings.base_url to the final address"
    if code in PERMANENT:
        return ModelError(message, code=code)
    return ModelError(message, retryable=True, retry_after=wait, code=code)


def failed_event(payload: dict[str, Any], *, host: str, key: str | None) -> ModelError:
    """Return the failure that an error inside a 200 answer or a stream amounts to."""
    error = _as_error(payload)
    said = redact(str(error.get("message") or "an error without a message"), key)
    if (status := _status_of(error.get("code"))) is not None:
        body = orjson.dumps({"error": {**error, "message": said}})
        return refusal(status, {}, body, host=host, key=key, now=datetime.now(UTC))
    words = words_of(error)
    message = f"{host} failed: {said}"
    if _is_too_long(HTTPStatus.BAD_REQUEST, words, said):
        return ContextWindowError(message, limit=_window(error, said))
    if any("rate_limit" in one for one in words):
        return RateLimitError(message)
    code = code_of(None, error, said)
    if code is None and "invalid_request_error" in words:
        code = ModelErrorCode.INVALID_REQUEST
    if code is None:
        return ModelError(message, retryable=True, code=ModelErrorCode.SERVER_ERROR)
    return ModelError(message, code=code)


def _status_of(code: Any) -> int | None:
    """Return the HTTP status that a code is; some servers send it as text."""
    if isinstance(code, str) and code.isascii() and code.isdigit() and len(code) == 3:  # noqa: PLR2004 - digits of a status
        code = int(code)
    is_status = isinstance(code, int) and HTTPStatus.BAD_REQUEST <= code <= _LAST_STATUS
    return code if is_status else None


def retry_after(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the seconds that the provider asks to wait: milliseconds, seconds or an HTTP date."""
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
        return milliseconds / 1000
    text = headers.get("retry-after")
    if text is None or (seconds := _number(text)) is not None:
        return seconds if text is not None else None
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - now).total_seconds())


def redact(text: str, key: str | None) -> str:
    """Return `text` without the key or what looks like one, cut to a bounded length."""
    if key:
        text = text.replace(key, "[key]")
    text = text[: 8 * _LONGEST_MESSAGE]  # a stranger's text may have megabytes
    text = _LOOKS_LIKE_A_KEY.sub("[key]", text)
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + " [cut]"


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return max(0.0, value) if value is not None and math.isfinite(value) else None


def _error_of(body: bytes) -> dict[str, Any]:
    """Return the error in a body: OpenAI's form, a bare one, a list of one, or plain text."""
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {"message": body.decode(errors="replace").strip()}
    if isinstance(payload, list) and payload:
        payload = payload[0]
    if not isinstance(payload, dict):
        return {"message": str(payload)}
    return _as_error(payload)


def _as_error(payload: dict[str, Any]) -> dict[str, Any]:
    error = payload.get("error")
    if isinstance(error, dict):
        return error
    if error:
        return {"message": str(error)}
    return {**payload, "message": payload.get("message") or payload.get("detail")}


def _is_too_long(status: int, codes: frozenset[str], said: str) -> bool:
    if codes & _TOO_LONG_CODES:
        return True
    refused = {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
    }
    return status in refused and _TOO_LONG.search(said) is not None


def _window(error: dict[str, Any], said: str) -> int | None:
    if isinstance(window := error.get("n_ctx"), int):
        return window
    found = _LIMIT.search(said)
    digits = next((group for group in found.groups() if group), None) if found else None
    return int(digits.replace(",", "")) if digits else None
