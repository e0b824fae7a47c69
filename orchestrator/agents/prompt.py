"""An agent's prompt: words the fields of a row, or of a dict, as the run's input. Pure.

A place is `{field}`, `{item.name}` or `{items.0}`; `{{` and `}}` are braces. Looks into dicts and
lists alone and formats nothing, so that neither a prompt nor a row reaches into the program.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records import exact_json

LIMIT = 1024 * 1024
"""Bytes of a prompt, and characters of a worded one."""
_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_INDEX = re.compile(r"\[(\d+)\]")
_SHOWN = 20


def checked_prompt(prompt: str) -> str:
    """Return `prompt`; raises `ValueError` where it cannot be filled in."""
    if len(prompt.encode("utf-8", "surrogatepass")) > LIMIT:
        raise ValueError(f"it is longer than {LIMIT:,} bytes; shorten it")
    if not any(name is not None for _, name in _pieces(prompt)):
        raise ValueError("it names no field; put the row's fields into it, as {description}")
    return prompt


Prompt = Annotated[str, AfterValidator(checked_prompt)]


def worded(prompt: str, fields: Mapping[str, Any]) -> str:
    """Return `prompt` with the values of `fields`: text as it is, null as nothing, else JSON.

    Raises `ConfigurationError` that names a missing field and those that exist, or when the text
    grows above 1 MiB.
    """
    values: dict[str, str] = {}
    texts = []
    size = 0
    for text, name in _pieces(prompt):
        if name is not None and name not in values:
            values[name] = _text(_value(name, fields))
        texts.append(text if name is None else values[name])
        size += len(texts[-1])
        if size > LIMIT:
            msg = f"the prompt has more than {LIMIT:,} characters with this row's fields"
            raise ConfigurationError(f"{msg}; shorten them")
    return "".join(texts)


def fields_of(prompt: str) -> list[str]:
    """Return the fields of a row that `prompt` words, in their order."""
    names = places_in(prompt)
    return list(dict.fromkeys(re.split(r"[.\[]", name)[0] for name in names))


def places_in(text: str) -> tuple[str, ...]:
    """Return the places that a text names, in their order. Raises `ValueError` as it is read."""
    return tuple(name for _, name in _pieces(text) if name is not None)


def names_shown(fields: Mapping[str, Any]) -> str:
    """Return the names of fields for a message, the first 20."""
    names = [str(name)[:60] for name in list(fields)[:_SHOWN]]
    more = len(fields) - len(names)
    return (", ".join(names) or "none") + (f" and {more} more" if more else "")


@lru_cache(maxsize=32)
def _pieces(prompt: str) -> tuple[tuple[str, str | None], ...]:
    """Return the prompt's texts and places in their order, as (text, None) and ("", name)."""
    pieces: list[tuple[str, str | None]] = []
    place = 0
    for found in _PIECE.finditer(prompt):
        pieces.append((prompt[place : found.start()], None))
        place = found.end()
        whole, name = found[0], found[1]
        if name is None and len(whole) == 1:
            raise ValueError(f"it has a single {whole!r}; write {whole * 2!r} for the character")
        pieces.append((whole[0], None) if name is None else ("", _checked_name(name)))
    return (*pieces, (prompt[place:], None))


def _checked_name(name: str) -> str:
    stripped = name.strip()
    if not stripped or "\n" in stripped or ":" in stripped or "!" in stripped:
        raise ValueError(
            f"{{{name[:60]}}} cannot be filled in; write a field's name, as {{description}} or "
            "{item.name}, and {{ and }} for braces"
        )
    return stripped


def _value(name: str, fields: Mapping[str, Any]) -> Any:
    if name in fields:
        return fields[name]
    value: Any = fields
    for part in _INDEX.sub(r".\1", name).split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part[:9]) < len(value):
            value = value[int(part[:9])]
        else:
            msg = f"field {name!r}, which the prompt names, is missing; there are: "
            raise ConfigurationError(msg + names_shown(fields))
    return value


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else exact_json.text(value)
