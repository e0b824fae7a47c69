"""Parts of refusals that all HTTP services share: texts without keys, times to wait. Pure."""

import email.utils
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime

_LONGEST_MESSAGE = 600
_LOOKS_LIKE_A_KEY = re.compile(r"\b(?:sk|gsk|pk|rk)-[A-Za-z0-9_*-]{6,}|Bearer \S+")


def redact(text: str, key: str | None) -> str:
    """Return `text` without the key or what looks like one, cut to a bounded length."""
    if key:
        text = text.replace(key, "[key]")
    text = text[: 8 * _LONGEST_MESSAGE]  # a foreign text may have megabytes
    text = _LOOKS_LIKE_A_KEY.sub("[key]", text)
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + " [cut]"


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


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return max(0.0, value) if value is not None and math.isfinite(value) else None
