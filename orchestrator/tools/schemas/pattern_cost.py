r"""Estimates what a regular expression costs before it is compiled. Pure; knows no engine's code.

The engine (Rust's `regex`) writes counted repetitions out: `(\\w{50}){50}` is 2,500 times the
automaton of `\\w`. Estimates are on the high side, and what cannot be read is taken for one atom.
"""

import re
from dataclasses import dataclass

from stepfleet.orchestrator.errors import ConfigurationError

_WORD, _DIGIT, _DOT, _LITERAL = 66 * 1024, 5 * 1024, 1024, 128
"""Bytes of an automaton, as measured: `\\w` and `\\p{L}`, `\\d` and `\\s`, `.`, one character."""
_HEAVY = frozenset("wWbBpP")
_MEDIUM = frozenset("dDsS")
_COUNT = re.compile(r"\{\s*(\d{0,9})\s*(,?)\s*(\d{0,9})\s*\}")
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|x..|u.{4}|U.{8}|[pP].|.)", re.DOTALL)
_OPENING = re.compile(r"\((?:\?(?:P?<[^>]*>|([a-zA-Z-]*)[:)]))?")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a pattern comes to: `atoms` that may be active at once, and `size` in bytes."""

    atoms: int = 0
    size: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.atoms + other.atoms, self.size + other.size)

    def times(self, count: int) -> "Cost":
        """Return the cost of `count` copies."""
        return Cost(self.atoms * count, self.size * count)


def cost_of(pattern: str) -> Cost:
    """Return the cost of a pattern.

    Raises `ConfigurationError` for the flag `x`, under which a pattern reads differently, and for
    classes that this module may read in another way than the engine.
    """
    outer: list[Cost] = []
    total, last, at = Cost(), Cost(), 0
    while at < len(pattern):
        one = pattern[at]
        if counted := _COUNT.match(pattern, at):
            total, last = total + last.times(_copies(counted) - 1), last.times(_copies(counted))
            at = counted.end()
        elif one == "(":
            at = _opened(pattern, at)
            if pattern[at - 1] != ")":  # `(?i)` opens nothing
                outer.append(total)
                total = Cost()
            last = Cost()
        elif one == ")":
            last, at = total, at + 1
            total = (outer.pop() if outer else Cost()) + last
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


def _atom(pattern: str, at: int) -> tuple[Cost, int]:
    """Return the cost of what begins at `at`, and where it ends."""
    if pattern[at] == "[":
        end = _class_end(pattern, at)
        inside = pattern[at:end]
        heavy = sum(_escaped(one) for one in _ESCAPE.findall(inside))
        # `[[:word:]]` is ASCII; a range may cover several lengths of UTF-8.
        return Cost(1, _DOT + heavy + _LITERAL * len(inside)), end
    if escape := _ESCAPE.match(pattern, at):
        return Cost(1, _escaped(escape.group())), escape.end()
    return Cost(1, _DOT if pattern[at] == "." else _LITERAL), at + 1


def _escaped(escape: str) -> int:
    kind = escape[1:2]
    return _WORD if kind in _HEAVY else _DIGIT if kind in _MEDIUM else _LITERAL


def _class_end(pattern: str, at: int) -> int:
    """Return the place behind a class, which may hold others."""
    depth = 0
    while at < len(pattern):
        one = pattern[at]
        if one == "\\":
            at += 2
            continue
        if one == "[":
            if depth and pattern[at - 1] == "-":  # the end of a range, or a class behind a dash
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
    """Return the place behind the opening: a `]` that comes first is one of the class."""
    at += 1
    if pattern.startswith("^", at):
        at += 1
    dashed = at
    while pattern.startswith("-", at):
        at += 1
    return at + 1 if at == dashed and pattern.startswith("]", at) else at
