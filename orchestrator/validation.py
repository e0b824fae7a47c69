"""Turns a validation error into one sentence that names the field and what is wrong."""

from pydantic import ValidationError


def explain_invalid(error: ValidationError, *, limit: int = 3) -> str:
    """Return the first `limit` problems of `error` as `field 'a.b': message`, joined by `; `."""
    problems = error.errors(include_url=False, include_context=False)
    said = [_problem(one["loc"], one["type"], one["msg"]) for one in problems[:limit]]
    more = len(problems) - limit
    return "; ".join(said) + (f"; and {more} more" if more > 0 else "")


def _problem(loc: tuple[int | str, ...], kind: str, message: str) -> str:
    field = ".".join(str(part) for part in loc) or "<root>"
    if kind == "extra_forbidden":
        return f"field {field!r} is not known"
    if kind == "missing":
        return f"field {field!r} is missing"
    return f"field {field!r}: {message[:1].lower()}{message[1:]}"
