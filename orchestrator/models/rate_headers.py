"""Reads the headers and the words of refusals in which providers state an account's limits. Pure.

Limits per minute alone are of use. Some services state those of a day under the same names: the
time until all is back shows it. Numbers that make no sense are left out.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

_OPENAI = "x-ratelimit-{field}-{kind}"
_ANTHROPIC = "anthropic-ratelimit-{kind}-{field}"
_KINDS = {"requests": "r", "tokens": "t", "input-tokens": "i", "output-tokens": "o"}
_FIELDS = ("limit", "remaining", "reset")
_NAMES = {
    form: {kind: [form.format(field=field, kind=word) for field in _FIELDS] for word, kind in kinds}
    for form, kinds in (
        (_OPENAI, [("requests", "r"), ("tokens", "t")]),
        (_ANTHROPIC, list(_KINDS.items())),
    )
}
_FIRST = tuple(names[kind][0] for names in _NAMES.values() for kind in "rt")
_MINUTE, _ROUNDED = 60.0, 1.5
_MOST = 1e12
_LEAST = 1.0
"""Per minute; a smaller one is not taken for a limit."""
_LONGEST = 64
_PARTS = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")
_UNITS = (3600.0, 60.0, 1.0, 0.001)
_MOST_WORDS, _MOST_VIOLATIONS = 1000, 8
_WORDS = r"(requests|(?:input |output )?tokens)"
_REACHED = re.compile(
    rf"{_WORDS} per min(?:ute)?\b(?: \([A-Z]+\))?: limit:? ([\d,]+)", re.IGNORECASE
)
"""OpenAI, Groq: `on requests per min (RPM): Limit 500, Used 500, Requested 1`."""
_EXCEEDED = re.compile(rf"rate limit of ([\d,]+) {_WORDS} per minute", re.IGNORECASE)
"""Anthropic: `would exceed your rate limit of 50,000 input tokens per minute`."""
_QUOTA = re.compile(r"(Requests|InputTokens|OutputTokens|Tokens)PerMinute", re.IGNORECASE)
"""Google: `GenerateRequestsPerMinutePerProjectPerModel`."""
_SCARCE = 3
_FIRST_MOMENT, _LAST_MOMENT = 1e9, 1e11
"""Seconds since 1970: of 2001, and of the year 5138. What is more is in smaller units."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A limit per minute, what of it is left, and the seconds until all is back (None: unknown)."""

    limit: float
    remaining: float | None = None
    reset: float | None = None

    @property
    def is_scarce(self) -> bool:
        """Whether less than a quarter is left of what there may be at once."""
        if self.remaining is None or self.reset is None:
            return False
        return self.remaining * _SCARCE < self.reset * self.limit / _MINUTE


def standings(headers: Mapping[str, str]) -> dict[str, Standing]:
    """Return what an answer's headers state, by kind: `r`equests, `t`okens, `i`nput, `o`utput.

    `headers` find names in any case. Moments are relative to the answer's own date.
    """
    if not any(name in headers for name in _FIRST):
        return {}
    found = {}
    for kinds in _NAMES.values():
        for kind, names in kinds.items():
            limit, remaining, reset = (headers.get(name, "")[:_LONGEST] for name in names)
            rate, left = _number(limit), _number(remaining)
            seconds = _seconds(reset, headers) if reset and rate else None
            if rate and rate >= _LEAST and (seconds is None or seconds <= _MINUTE + _ROUNDED):
                found[kind] = Standing(rate, left, seconds)
    return found


def seconds_until(number: float, now: datetime, unit: float = 1.0) -> float:
    """Return a stated wait of `number` units in seconds; what is plainly a moment is one.

    A moment counts from 1970, in seconds, milliseconds or smaller units.
    """
    if not _FIRST_MOMENT <= number < _LAST_MOMENT * 1e9:
        return number * unit
    while number >= _LAST_MOMENT:
        number /= 1000
    return max(number - now.timestamp(), 0.0)


def stated_in_refusal(message: str, error: Mapping[str, Any]) -> dict[str, float]:
    """Return the limits per minute that a refusal (429) states, by kind as `standings` has them.

    `error` is the object with the provider's `message`; Google's has the quotas in its `details`.
    """
    text = message[:_MOST_WORDS]
    stated = [(word, limit) for word, limit in _REACHED.findall(text)]
    stated += [(word, limit) for limit, word in _EXCEEDED.findall(text)]
    stated += _quotas(error.get("details"))
    found: dict[str, float] = {}
    for word, limit in stated:
        kind = word[0].lower()  # r, t, i or o
        rate = _number(limit.replace(",", "")[:_LONGEST])
        if rate is not None and rate >= _LEAST:
            found[kind] = min(rate, found.get(kind, rate))
    return found


def _quotas(details: Any) -> Iterator[tuple[str, str]]:
    for detail in details if isinstance(details, list) else ():
        violations = detail.get("violations") if isinstance(detail, dict) else None
        for one in violations[:_MOST_VIOLATIONS] if isinstance(violations, list) else ():
            named = one.get("quotaId") if isinstance(one, dict) else None
            if isinstance(named, str) and (kind := _QUOTA.search(named[:_MOST_WORDS])):
                yield kind.group(1), str(one.get("quotaValue"))[:_LONGEST]


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= _MOST else None


def _seconds(text: str, headers: Mapping[str, str]) -> float | None:
    """Return the seconds of `6m0s`, `20ms`, `1.5` or a moment; None for what is none of these."""
    if (number := _number(text)) is not None and number < _FIRST_MOMENT:
        return number
    if text[0].isdigit() and (parts := _PARTS.fullmatch(text)):
        return sum(float(part) * unit for part, unit in zip(parts.groups("0"), _UNITS, strict=True))
    try:
        sent = parsedate_to_datetime(headers["date"])
        if text.isdecimal():
            return seconds_until(float(text), sent)
        moment = datetime.fromisoformat(text)
        return max((moment - sent).total_seconds(), 0.0)
    except (KeyError, ValueError, TypeError, OverflowError):  # no moment, or one without a zone
        return None
