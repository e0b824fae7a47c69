"""The input of a run that is made of the results of runs before it. Pure.

A text names places, as `{output}`. What is put there is data: braces in it mean nothing. Each
result is cut, so that an input is never too large for its run.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from stepfleet.orchestrator.agents.prompt import places_in, worded
from stepfleet.orchestrator.errors import ConfigurationError

LONGEST = 8_000
"""Characters of one result in an input."""
LONGEST_TEXT = 100_000
"""Characters of the text around them."""
_ROOM = 900_000
"""Bytes of all results in an input together, which may have 1 MiB."""
_LONGEST_ID = 100
_BESIDE = 60
"""Bytes of a result's JSON beside its id and its text, and of the note that it was cut."""
_PLACE = re.compile(r"(?<!\{)\{([^{}]+)\}(?!\})")
NO_TEXT = "(no text)"
OUTPUT, OUTPUTS, COUNT = "output", "outputs", "count"


@dataclass(frozen=True, slots=True)
class Before:
    """A run that has ended: its line's id or its own, its answer, or why there is none."""

    name: str
    text: str | None
    error: str | None = None


def check_places(
    text: str, known: Collection[str], field: str = "input", *, required: bool = True
) -> None:
    """Raise `ConfigurationError` for an unknown place, or for a text without any."""
    if not isinstance(text, str):
        raise ConfigurationError(f"field {field!r} is no text; write one with {_shown(known)}")
    if len(text) > LONGEST_TEXT:
        msg = f"field {field!r} has {len(text):,} characters; the limit is {LONGEST_TEXT:,}"
        raise ConfigurationError(f"{msg}: put more into the agent's instructions")
    try:
        places = places_in(text)
    except ValueError as error:
        raise ConfigurationError(f"field {field!r}: {error}") from None
    unknown = [one for one in places if one not in known]
    if unknown or (required and not places):
        why = f"names {{{unknown[0][:60]}}}" if unknown else "names no result"
        raise ConfigurationError(f"field {field!r} {why}; there are: {_shown(known)}")


def check_data(given: Any, known: Collection[str], field: str = "input") -> None:
    """Raise `ConfigurationError` where data names a place, which only a text can have."""
    left: list[Any] = [given] if isinstance(given, Mapping) else []
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
        elif isinstance(one, str) and (places := set(_PLACE.findall(one)) & set(known)):
            msg = f"field {field!r} is a dict and names {{{min(places)[:60]}}}: only a text has"
            raise ConfigurationError(f"{msg} places for results; write one, as 'Use: {{output}}'")


def places_of(names: Collection[str]) -> tuple[str, ...]:
    """Return the places that an input behind runs of these names may have."""
    return (*((OUTPUT,) if len(names) == 1 else ()), OUTPUTS, COUNT, *names)


def composed(text: str, before: Sequence[Before], others: Mapping[str, str]) -> str:
    """Return `text` with the results in their places.

    `{output}` is the first result, `{outputs}` a JSON list of them all, `{count}` their number;
    `others` are further texts. Raises `ConfigurationError` for a place that is none of these.
    """
    places = places_in(text)
    weight = sum(len(before) if one == OUTPUTS else 1 for one in places)
    room = (_ROOM - len(text.encode())) // max(weight, 1)
    texts = {OUTPUT: _text(before[0]), COUNT: str(len(before)), **others}
    values = {name: cut(value, room) for name, value in texts.items() if name in places}
    if OUTPUTS in places:
        values[OUTPUTS] = "[" + ",\n".join(_item(one, room) for one in before) + "]"
    return worded(text, values)


def answer_text(output: str | None, structured: Any) -> str:
    """Return a run's answer as a text: its data as JSON, where it has some."""
    if structured is not None:
        return json.dumps(structured, ensure_ascii=False)
    return output if output and output.strip() else NO_TEXT


def cut(text: str, room: int, most: int = LONGEST) -> str:
    """Return the beginning of a text: `most` characters, and no more than `room` bytes of JSON."""
    text = text.encode("utf-8", "replace").decode()
    kept = min(len(text), most)
    while kept and (size := len(orjson.dumps(text[:kept]))) > room:
        kept = min(kept - 1, kept * max(room, 0) // size)
    left = len(text) - kept
    return f"{text[:kept]} [{left:,} more characters]" if left else text


def _item(one: Before, room: int) -> str:
    name = one.name.encode("utf-8", "replace").decode()[:_LONGEST_ID]
    left = room - len(orjson.dumps(name)) - _BESIDE
    kind = "error" if one.text is None else OUTPUT
    return orjson.dumps({"id": name, kind: cut(_text(one), left)}).decode()


def _text(one: Before) -> str:
    return one.error or NO_TEXT if one.text is None else one.text


def _shown(known: Collection[str]) -> str:
    names = [f"{{{one}}}" for one in list(known)[:10]]
    return ", ".join(names) + (" and more" if len(known) > len(names) else "")
