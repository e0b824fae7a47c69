"""Words for people: validation errors as one sentence, durations, common forms of texts."""

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def with_article(word: str) -> str:
    """Return `an Agent`, `a list`."""
    return f"{'an' if word[:1].lower() in 'aeio' else 'a'} {word}"


_TIME = re.compile(r"(\d{1,9})([smhdw]?)", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def duration(text: str) -> int | None:
    """Return a duration in seconds, which a number alone is; None for what is none."""
    found = _TIME.fullmatch(text.strip().lower())
    return int(found[1]) * _SECONDS[found[2]] if found else None


LONGEST = 300
"""Most characters of a common form."""
_READ = 4 * LONGEST
_ID = 8
"""Hexadecimal digits from which a word with a digit is an id."""
_VALUE, _NUMBER = "'\N{HORIZONTAL ELLIPSIS}'", "#"
_CUT = "\0"
_CUT_EARLIER = " more characters)"
_PARTS = re.compile(
    r"""
    (?P<escaped>\\.)
  | (?P<request>\ \(request\ [^\s()]{1,128}\))
  | (?P<status>(?:\b(?:answered|status(?:[ _]code)?|http(?:/[\d.]{1,3})?|error(?:[ _]code)?)
      [ :='"]{1,3}|['"])[1-5]\d\d(?=\D|$))
  | (?P<url>\b[a-z][a-z0-9+.-]{0,15}+://[^\s"'<>()\[\]{}]++)
  | (?P<quoted>(?<!\w)(?:
        '(?:[^'\\\0]++|\\.)*+(?:'(?!\w)|\0)
      | "(?:[^"\\\0]++|\\.)*+["\0]
      | `[^`\0]*+[`\0]
      | \u2018[^\u2019\0]*+[\u2019\0]
      | \u201c[^\u201d\0]*+[\u201d\0]
      | \u00ab[^\u00bb\0]*+[\u00bb\0]))
  | (?P<id>\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b)
  | (?P<word>\w++)
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
_HOST = re.compile(r"[^/?#]*")
# Without possessive groups: Python 3.11.2 goes on after a part of one that did not match.
_NUMBERS = re.compile(r"(?:(?<!\w)-)?#(?:[-.,:/_+]\s?#)*")
_VALUES = re.compile(rf"{_VALUE}(?:,\s?{_VALUE})+")
_HEX = re.compile(r"[0-9a-f]+", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")


def common_form(text: str) -> str:
    """Return `text` on one line without numbers, ids, quoted values and parameters of addresses.

    HTTP statuses stay. At most `LONGEST` characters are returned, of the text's beginning.
    """
    if len(text) > _READ or text.endswith(_CUT_EARLIER):
        text = text[:_READ] + _CUT  # ends a quotation whose end was cut off
    found = _PARTS.sub(_general, text).removesuffix(_CUT)
    found = _VALUES.sub(_VALUE, _NUMBERS.sub(_NUMBER, found))
    return " ".join(found.split())[:LONGEST]


def _general(part: re.Match[str]) -> str:
    """Return the general form of a part of a text."""
    text = part[0]
    match part.lastgroup:
        case "quoted":
            return _VALUE
        case "request":  # the provider's name of one request
            return ""
        case "id":
            return _NUMBER
        case "url":
            return _address(text)
        case "word":
            return _word(text)
        case _:
            return text


def _address(text: str) -> str:
    """Return an address without credentials, query and fragment, its path in general form."""
    scheme, _, rest = text.partition("://")
    host = _HOST.match(rest)[0]  # type: ignore[index]  # it matches the empty text too
    path = re.split(r"[?#]", rest[len(host) :], maxsplit=1)[0]
    host = host.rpartition("@")[2]
    return f"{scheme}://" + re.sub(r"\w+", lambda word: _word(word[0]), host + path)


def _word(text: str) -> str:
    """Return a word: an id as `#`, another one with its digits replaced."""
    runs = len(_DIGITS.findall(text))
    if not runs:
        return text
    is_hex = len(text) >= _ID and _HEX.fullmatch(text)
    return _NUMBER if runs > 1 or is_hex else _DIGITS.sub(_NUMBER, text)


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
