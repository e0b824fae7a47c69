"""Durations as people write them: `90s`, `15m`, `12h`, `2d`, `1w`. Pure."""

import re

_TIME = re.compile(r"(\d{1,9})([smhdw]?)", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def duration(text: str) -> int | None:
    """Return a duration in seconds, which a number alone is; None for what is none."""
    found = _TIME.fullmatch(text.strip().lower())
    return int(found[1]) * _SECONDS[found[2]] if found else None
