"""Decides what kind of failure a service's refusal is, from its status and its words. Pure.

OpenAI tells failures apart by `code` and `type`; compatible servers use codes of their own, repeat
the status there, or say it in the message alone. Codes win over the status, and a message is only
asked where both leave the matter open.
"""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from stepfleet.orchestrator.records.errors import ModelErrorCode

_CODES: tuple[tuple[ModelErrorCode, frozenset[str]], ...] = (
    (
        ModelErrorCode.QUOTA_EXHAUSTED,
        frozenset(
            {
                "insufficient_quota",
                "insufficient_user_quota",
                "insufficient_balance",
                "insufficient_credits",
                "exceeded_current_quota_error",
                "billing_error",
                "billing_hard_limit_reached",
                "billing_not_active",
                "budget_exceeded",
                "payment_required",
            }
        ),
    ),
    (
        ModelErrorCode.CONTENT_FILTER,
        frozenset(
            {
                "content_filter",
                "content_filtered",
                "content_policy_violation",
                "data_inspection_failed",
                "responsibleaipolicyviolation",
            }
        ),
    ),
    (
        ModelErrorCode.MODEL_NOT_FOUND,
        frozenset(
            {
                "model_not_found",
                "model_not_found_error",
                "model_not_available",
                "model_decommissioned",
                "invalid_model",
                "deploymentnotfound",
                "notfounderror",
                "not_found_error",
            }
        ),
    ),
    (
        ModelErrorCode.PERMISSION_DENIED,
        frozenset(
            {
                "access_denied",
                "key_model_access_denied",
                "team_model_access_denied",
                "permission_denied",
                "permission_error",
                "request_forbidden",
                "unsupported_country_region_territory",
            }
        ),
    ),
    (
        ModelErrorCode.INVALID_API_KEY,
        frozenset(
            {
                "auth_error",
                "authentication_error",
                "expired_key",
                "invalid_api_key",
                "invalid_authentication_error",
                "unauthenticated",
                "unauthorized",
            }
        ),
    ),
    (ModelErrorCode.INVALID_REQUEST, frozenset({"not_supported_error"})),
)
_STATUSES = {
    HTTPStatus.UNAUTHORIZED: ModelErrorCode.INVALID_API_KEY,
    HTTPStatus.PAYMENT_REQUIRED: ModelErrorCode.QUOTA_EXHAUSTED,
    HTTPStatus.FORBIDDEN: ModelErrorCode.PERMISSION_DENIED,
    HTTPStatus.NOT_FOUND: ModelErrorCode.MODEL_NOT_FOUND,
    HTTPStatus.REQUEST_TIMEOUT: ModelErrorCode.TIMEOUT,
    HTTPStatus.CONFLICT: ModelErrorCode.SERVER_ERROR,
    HTTPStatus.TOO_EARLY: ModelErrorCode.SERVER_ERROR,
    HTTPStatus.TOO_MANY_REQUESTS: ModelErrorCode.RATE_LIMIT,
    HTTPStatus.NOT_IMPLEMENTED: ModelErrorCode.INVALID_REQUEST,
    HTTPStatus.GATEWAY_TIMEOUT: ModelErrorCode.TIMEOUT,
}
_OUT_OF_MONEY = re.compile(
    r"insufficient (?:balance|credits?|funds|quota)|credit balance is too low"
    r"|budget has been exceeded",
    re.IGNORECASE,
)
_BAD_KEY = re.compile(
    r"api[ _-]?key (?:is )?(?:not valid|invalid|expired)|(?:invalid|incorrect) api[ _-]?key",
    re.IGNORECASE,
)
_NO_MODEL = re.compile(
    r"\bmodel\b.{0,120}?\b(?:does not exist|not found)"
    r"|is not a valid model|invalid model name|no such model",
    re.IGNORECASE,
)
_WORDS = (
    (ModelErrorCode.QUOTA_EXHAUSTED, _OUT_OF_MONEY),
    (ModelErrorCode.INVALID_API_KEY, _BAD_KEY),
    (ModelErrorCode.MODEL_NOT_FOUND, _NO_MODEL),
)
_ASKED = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.TOO_MANY_REQUESTS,
    }
)
"""Statuses that say too little: there the message is asked too."""


def words_of(error: Mapping[str, Any]) -> frozenset[str]:
    """Return the codes that an error body names, in small letters."""
    inner = error.get("innererror")
    named = [error.get("code"), error.get("type"), error.get("status")]
    if isinstance(inner, Mapping):
        named.append(inner.get("code"))
    return frozenset(str(one).lower() for one in named if isinstance(one, str | int))


def code_of(status: int | None, error: Mapping[str, Any], said: str) -> ModelErrorCode | None:
    """Return what kind of failure it is; None where neither codes nor status (if any) tell."""
    words = words_of(error)
    for code, known in _CODES:
        if words & known:
            return code
    metadata = error.get("metadata")
    if isinstance(metadata, Mapping) and ("flagged_input" in metadata or "reasons" in metadata):
        return ModelErrorCode.CONTENT_FILTER
    if status is None or status in _ASKED:
        for code, pattern in _WORDS:
            if pattern.search(said):
                return code
    return None if status is None else _by_status(status)


def _by_status(status: int) -> ModelErrorCode:
    known = _STATUSES.get(HTTPStatus(status)) if status in _STATUSES else None
    if known is not None:
        return known
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return ModelErrorCode.SERVER_ERROR
    return ModelErrorCode.INVALID_REQUEST
