"""Turns a validation error into one sentence that names the field and what is wrong."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def explain_invalid(
    error: ValidationError,
    *,
    limit: int = 3,
    record: type[BaseModel] | None = None,
    count: int | None = None,
) -> str:
    """Return the first `limit` problems of `error` as `field 'a.b': message`, joined by `; `.

    With `record`, the type that was read, unknown fields are reported with the closest known one.
    `count` is how many problems there are, where `error` has only some of them.
    """
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    texts = [_problem(one["loc"], one["type"], one["msg"], record) for one in problems[:limit]]
    more = (count or len(problems)) - len(texts)
    return "; ".join(texts) + (f"; and {more} more" if more > 0 else "")


def meant(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` where one of `known` is close to `name`, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _problem(
    loc: tuple[int | str, ...], kind: str, message: str, record: type[BaseModel] | None
) -> str:
    field = ".".join(str(part) for part in loc) or "<root>"
    if kind == "extra_forbidden":
        return f"field {field!r} is not known{meant(str(loc[-1]), _fields_at(record, loc[:-1]))}"
    if kind == "missing":
        return f"field {field!r} is missing"
    message = message.removeprefix("Value error, ")
    return f"field {field!r}: {message[:1].lower()}{message[1:]}"


def _fields_at(record: type[BaseModel] | None, path: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the fields of the record at `path`; nothing where it is not known."""
    for part in path:
        field = record.model_fields.get(str(part)) if record else None
        record = next(_records(field.annotation), None) if field else None
    return tuple(record.model_fields) if record else ()


def _records(annotation: Any) -> Iterator[type[BaseModel]]:
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            yield one
