"""When two requests are the same: their canonical form and its hash. Pure.

The form holds what the model is asked and where, and nothing that opens the door: no key, no
header, no organization. How an answer is brought here (streamed, how long is waited) is no part
of the question either.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from stepfleet.orchestrator.records.responses import ModelRequest

FORM = 1
"""Number of the form: entries of another one are never found."""

_NOT_ASKED = {"base_url", "api_key_env", "organization", "timeout", "stream"}
_LEFT_OUT: Mapping[str, Any] = {
    "settings": _NOT_ASKED,
    "messages": {"__all__": {"metadata": True, "tool_calls": {"__all__": {"error"}}}},
}


def canonical(request: ModelRequest, provider: str) -> str:
    """Return the request's canonical form (JSON, keys sorted); `provider` says who is asked.

    Raises `ValueError`, `TypeError` or `RecursionError` for what cannot be written as JSON.
    """
    asked = request.model_dump(mode="json", exclude=dict(_LEFT_OUT), warnings=False)
    form = {"form": FORM, "provider": provider, "request": asked}
    return json.dumps(form, sort_keys=True, separators=(",", ":"))


def key_of(request: ModelRequest, provider: str) -> str:
    """Return the key of a request: SHA-256 (hex) of its canonical form. Raises as `canonical`."""
    return hashlib.sha256(canonical(request, provider).encode()).hexdigest()
