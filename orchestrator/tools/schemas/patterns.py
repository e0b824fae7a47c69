r"""Regular expressions of schemas, matched in time linear in the text, within bounds.

A stranger may write a schema, or an answer, and Python's own engine takes exponential time on some
patterns. Pydantic's (Rust's `regex`) is used instead, which has neither look-around nor
back-references. It bounds neither the memory of a pattern nor the time of one match, so both are
estimated before: it writes counted repetitions out, and `(\w{50}){50}` is 2,500 times the
automaton of `\w`. Estimates are on the high side; an unreadable part counts as one atom.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, core_schema

from stepfleet.orchestrator.errors import ConfigurationError

LONGEST = 4096
"""Characters of a pattern."""
LARGEST = 8 * 1024 * 1024
"""Bytes that a pattern may take when it is compiled, as estimated."""
KEPT = 64 * 1024 * 1024
"""Bytes of compiled patterns that a process keeps, as estimated."""
MOST_WORK = 12_500_000
"""Atoms of a pattern, times characters of a text: some 0.3 s of one match."""
MOST_PATTERNS = 100
MOST_PATTERN_BYTES = 16 * 1024 * 1024
"""Bytes that all patterns of a schema may take when they are compiled, as estimated."""

_WORD, _DIGIT, _DOT, _LITERAL = 66 * 1024, 5 * 1024, 1024, 128
"""Bytes of an automaton, as measured: `\\w` and `\\p{L}`, `\\d` and `\\s`, `.`, one character."""
_HEAVY = frozenset("wWbBpP")
_MEDIUM = frozenset("dDsS")
_COUNT = re.compile(r"\{\s*(\d{0,9})\s*(,?)\s*(\d{0,9})\s*\}")
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|x..|u.{4}|U.{8}|[pP].|.)", re.DOTALL)
_OPENING = re.compile(r"\((?:\?(?:P?<[^>]*>|([a-zA-Z-]*)[:)]))?")


@dataclass(frozen=True, slots=True)
class PatternCost:
    """The cost of a pattern: `atoms` that may be active at once, and `size` in bytes."""

    atoms: int = 0
    size: int = 0

    def __add__(self, other: "PatternCost") -> "PatternCost":
        return PatternCost(self.atoms + other.atoms, self.size + other.size)

    def times(self, count: int) -> "PatternCost":
        """Return the cost of `count` copies."""
        return PatternCost(self.atoms * count, self.size * count)


class TooMuchMatchingError(Exception):
    """A text is too long for a pattern with that many parts."""


def matches(pattern: str, text: str) -> bool:
    """Return whether `pattern` is found in `text`.

    Raises `ConfigurationError` as `compiled`, and `TooMuchMatchingError` for a text of more than
    `MOST_WORK` characters per part of the pattern.
    """
    cost, found = _compiled.of(pattern)
    if cost.atoms * len(text) > MOST_WORK:
        raise TooMuchMatchingError
    return found.isinstance_python(text)


def compiled(pattern: str) -> PatternCost:
    """Compile `pattern` and return its cost.

    Raises `ConfigurationError` for one that is wrong, too large, or needs backtracking.
    """
    return _compiled.of(pattern)[0]


class _Compiled:
    """Compiled patterns, the latest used ones of them; for any thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[PatternCost, SchemaValidator]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def of(self, pattern: str) -> tuple[PatternCost, SchemaValidator]:
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


def _made(pattern: str) -> tuple[PatternCost, SchemaValidator]:
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


def check_patterns(patterns: Iterable[str]) -> None:
    """Raise `ConfigurationError` where there are too many patterns, or too large ones together."""
    size = 0
    for number, pattern in enumerate(patterns, start=1):
        if number > MOST_PATTERNS:
            raise ConfigurationError(f"has more than {MOST_PATTERNS} patterns; use fewer")
        try:
            size += cost_of(pattern).size
        except ConfigurationError:
            continue  # it is never compiled
        if size > MOST_PATTERN_BYTES:
            raise ConfigurationError(
                "has patterns whose repetitions exceed the size limit of "
                f"{MOST_PATTERN_BYTES // 1024**2} MiB together; repeat less, or use maxLength"
            )


def patterns_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the patterns that a schema itself holds, not those of schemas inside."""
    named, single = schema.get("patternProperties"), schema.get("pattern")
    patterns = [one for one in named if isinstance(one, str)] if isinstance(named, Mapping) else []
    return [*patterns, single] if isinstance(single, str) else patterns


def cost_of(pattern: str) -> PatternCost:
    """Return the cost of a pattern.

    Raises `ConfigurationError` for the flag `x`, under which a pattern reads differently, and for
    classes that this module may read in another way than the engine.
    """
    outer: list[PatternCost] = []
    total, last, at = PatternCost(), PatternCost(), 0
    while at < len(pattern):
        one = pattern[at]
        if counted := _COUNT.match(pattern, at):
            total, last = total + last.times(_copies(counted) - 1), last.times(_copies(counted))
            at = counted.end()
        elif one == "(":
            at = _opened(pattern, at)
            if pattern[at - 1] != ")":  # `(?i)` opens nothing
                outer.append(total)
                total = PatternCost()
            last = PatternCost()
        elif one == ")":
            last, at = total, at + 1
            total = (outer.pop() if outer else PatternCost()) + last
        elif one in "*+?|^$":
            at += 1
        else:
            last, at = _atom(pattern, at)
            total += last
    for before in outer:
        total += before
    return total


def _copies(counted: re.Match[str]) -> int:
    least, comma, most = counted.groups()
    return max(int(most or 0), int(least or 0) + bool(comma), 1)


def _opened(pattern: str, at: int) -> int:
    opening = _OPENING.match(pattern, at)
    if opening is None:
        return at + 1
    if "x" in (opening.group(1) or ""):
        raise _unclear(pattern, "write it without the flag x")
    return opening.end()


def _atom(pattern: str, at: int) -> tuple[PatternCost, int]:
    """Return the cost of the atom at `at`, and its end."""
    if pattern[at] == "[":
        end = _class_end(pattern, at)
        inside = pattern[at:end]
        heavy = sum(_escaped(one) for one in _ESCAPE.findall(inside))
        # `[[:word:]]` is ASCII; a range may cover several lengths of UTF-8.
        return PatternCost(1, _DOT + heavy + _LITERAL * len(inside)), end
    if escape := _ESCAPE.match(pattern, at):
        return PatternCost(1, _escaped(escape.group())), escape.end()
    return PatternCost(1, _DOT if pattern[at] == "." else _LITERAL), at + 1


def _escaped(escape: str) -> int:
    kind = escape[1:2]
    return _WORD if kind in _HEAVY else _DIGIT if kind in _MEDIUM else _LITERAL


def _class_end(pattern: str, at: int) -> int:
    """Return the place after a class, which may hold others."""
    depth = 0
    while at < len(pattern):
        one = pattern[at]
        if one == "\\":
            at += 2
            continue
        if one == "[":
            if depth and pattern[at - 1] == "-":  # the end of a range, or a class after a dash
                raise _unclear(pattern, r"write \[ in its class")
            depth += 1
            at = _class_begun(pattern, at)
            continue
        at += 1
        if one == "]":
            depth -= 1
            if not depth:
                return at
    raise _unclear(pattern, r"a class is not closed; write \[ for the character")


def _unclear(pattern: str, fix: str) -> ConfigurationError:
    return ConfigurationError(f"pattern {pattern[:100]!r} cannot be used: {fix}")


def _class_begun(pattern: str, at: int) -> int:
    """Return the place after the opening: a `]` that comes first belongs to the class."""
    at += 1
    if pattern.startswith("^", at):
        at += 1
    dashed = at
    while pattern.startswith("-", at):
        at += 1
    return at + 1 if at == dashed and pattern.startswith("]", at) else at
