"""Regular expressions of schemas, matched in time linear in the text, within bounds.

Who writes a schema, or an answer, may be a stranger: Python's own engine takes exponential time
on some patterns. Pydantic's is used instead, which has neither look-around nor back-references.
It knows no limit of its own for the memory of a pattern and for the time of one match: both are
estimated before (`pattern_cost`).
"""

import threading
from collections import OrderedDict

from pydantic_core import SchemaError, SchemaValidator, core_schema

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.tools.schemas.pattern_cost import Cost, cost_of

LONGEST = 4096
"""Characters of a pattern."""
LARGEST = 8 * 1024 * 1024
"""Bytes that a pattern may take when it is compiled, as estimated."""
KEPT = 64 * 1024 * 1024
"""Bytes of compiled patterns that a process keeps, as estimated."""
MOST_WORK = 12_500_000
"""Atoms of a pattern, times characters of a text: some 0.3 s of one match."""


class TooMuchMatchingError(Exception):
    """A text is too long for a pattern that has so many parts."""


def matches(pattern: str, text: str) -> bool:
    """Return whether `pattern` is found in `text`.

    Raises `ConfigurationError` as `compiled`, and `TooMuchMatchingError` for a text of more than
    `MOST_WORK` characters per part of the pattern.
    """
    cost, found = _compiled.of(pattern)
    if cost.atoms * len(text) > MOST_WORK:
        raise TooMuchMatchingError
    return found.isinstance_python(text)


def compiled(pattern: str) -> Cost:
    """Compile `pattern` and return its cost.

    Raises `ConfigurationError` for one that is wrong, too large, or needs backtracking.
    """
    return _compiled.of(pattern)[0]


class _Compiled:
    """Compiled patterns, the latest used ones of them; for any thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Cost, SchemaValidator]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def of(self, pattern: str) -> tuple[Cost, SchemaValidator]:
        with self._lock:
            if known := self._kept.get(pattern):
                self._kept.move_to_end(pattern)
                return known
        made = _made(pattern)
        with self._lock:
            if pattern not in self._kept:
                self._kept[pattern] = made
                self._size += made[0].size
            while self._size > KEPT:
                _, (cost, _) = self._kept.popitem(last=False)
                self._size -= cost.size
        return made


_compiled = _Compiled()


def _made(pattern: str) -> tuple[Cost, SchemaValidator]:
    if len(pattern) > LONGEST:
        raise ConfigurationError(
            f"pattern {pattern[:100]!r} cannot be used: it has more than {LONGEST} characters"
        )
    cost = cost_of(pattern)
    if cost.size > LARGEST:
        raise ConfigurationError(
            f"pattern {pattern[:100]!r} cannot be used: its repetitions exceed the size limit of "
            f"{LARGEST // 1024**2} MiB; repeat less, or use maxLength"
        )
    try:
        return cost, SchemaValidator(core_schema.str_schema(pattern=pattern))
    except SchemaError as error:
        why = str(error).strip().splitlines()[-1].removeprefix("error: ")
        raise ConfigurationError(
            f"pattern {pattern[:100]!r} cannot be used: {why}; write it without look-around and "
            "back-references"
        ) from None
