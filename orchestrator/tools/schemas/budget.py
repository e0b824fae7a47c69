"""How large a JSON Schema may be before anything is made of it. Pure, and linear in the schema.

Judges every part of the document, also what is no schema: what is not walked is not bounded.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.tools.schemas.bounded_json import MAX_DEPTH
from stepfleet.orchestrator.tools.schemas.pattern_cost import cost_of

MOST_PARTS = 5_000
"""Objects and arrays of a schema: to check its own form takes up to 0.3 ms for each."""
MOST_CHARACTERS = 1024 * 1024
MOST_PATTERNS = 100
MOST_PATTERN_BYTES = 16 * 1024 * 1024
"""Bytes that all patterns of a schema may take when they are compiled, as estimated."""


def check_budget(schema: Any) -> int:
    """Return the number of a schema's parts.

    Raises `ConfigurationError` that says what there is too much of.
    """
    count = characters = 0
    patterns: list[str] = []
    for part, depth in _parts(schema):
        count += 1
        characters += _own_characters(part)
        if depth > MAX_DEPTH:
            raise ConfigurationError("is nested too deeply to be checked")
        if count > MOST_PARTS:
            raise ConfigurationError(f"has more than {MOST_PARTS} objects and arrays; use fewer")
        if characters > MOST_CHARACTERS:
            raise ConfigurationError(f"has more than {MOST_CHARACTERS} characters; use fewer")
        if isinstance(part, Mapping):
            patterns += _patterns(part)
    check_patterns(patterns)
    return count


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


def _parts(schema: Any) -> Iterator[tuple[Any, int]]:
    """Yield every object and array with its depth; without recursion."""
    waiting = [(schema, 0)]
    while waiting:
        part, depth = waiting.pop()
        if not isinstance(part, Mapping | list | tuple):
            continue
        yield part, depth
        inner = part.values() if isinstance(part, Mapping) else part
        waiting += [(one, depth + 1) for one in inner]


def _own_characters(part: Any) -> int:
    """Return the characters that a part has itself, with 1 for each value that is no text."""
    if isinstance(part, Mapping):
        names = sum(len(one) if isinstance(one, str) else 1 for one in part)
        part = part.values()
    else:
        names = 0
    return names + sum(len(one) if isinstance(one, str) else 1 for one in part)


def _patterns(part: Mapping[str, Any]) -> list[str]:
    named, single = part.get("patternProperties"), part.get("pattern")
    patterns = [one for one in named if isinstance(one, str)] if isinstance(named, Mapping) else []
    return [*patterns, single] if isinstance(single, str) else patterns
