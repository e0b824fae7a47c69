"""Numbers, times and foreign text as people read them on a terminal. Pure."""

import math
from datetime import datetime
from decimal import Decimal
from typing import Any

from stepfleet.orchestrator.records import exact_json

_SMALLEST = 9
"""Digits of a billionth of a dollar, the unit in which the ledger counts."""
WIDE = 100
"""Columns of a terminal from which on a table has all its columns beside each other."""
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def seconds(value: float | None) -> str:
    """Return a duration: `0.4 s`, `12 s`, `3 min 05 s`, `2 h 10 min`; `-` if unknown."""
    if value is None:
        return "-"
    if value < 10:  # noqa: PLR2004 - below this, tenths tell something
        return f"{value:.1f} s"
    whole = round(value)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02d} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def usd(value: float | Decimal, *, guessed: bool = False) -> str:
    """Return an amount: cents for large ones, more digits for small ones.

    `guessed` marks an estimate: by a default price, or of tokens that were counted here.
    """
    if guessed:
        return f"~{usd(value)}"
    if value < 0:
        return f"-{usd(-value)}"
    if not value or value >= 1:
        return f"${value:,.2f}"
    digits = max(4, 1 - math.floor(math.log10(value)))  # two that are no zeros
    return f"${value:.{min(digits, _SMALLEST)}f}"


def count(value: int, *, guessed: bool = False) -> str:
    """Return a whole number with thousands separated; `guessed` marks an estimate."""
    return f"~{value:,}" if guessed else f"{value:,}"


def moment(value: datetime | None) -> str:
    """Return a time in UTC to the second, or `-`."""
    return value.strftime("%Y-%m-%d %H:%M:%S") + " UTC" if value else "-"


def shown(value: Any, limit: int = 0) -> str:
    """Return foreign data as text that cannot move the cursor or colour the terminal.

    Line breaks and tabs stay where there is no `limit`; with one, the text becomes a single
    line of at most that many characters.
    """
    text = value if isinstance(value, str) else exact_json.text(value, default=str)
    if limit:
        text = " ".join(text.split())
        text = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return "".join(
        one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text
    )


def shown_error(text: str, limit: int = 0) -> str:
    """Return an error as `shown` does; one that is too long keeps both ends.

    The error of a run below others ends with its cause, behind those that it went through.
    """
    line = " ".join(text.split())
    if not limit or len(line) <= limit:
        return shown(text, limit)
    half = (limit - 3) // 2
    return shown(f"{line[:half].rstrip()} … {line[-half:].lstrip()}", limit)
