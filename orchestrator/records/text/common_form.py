"""The common form of an error's text: equal for errors that differ in a number, an id or a value.

The time is linear in the text's length, whatever the text is: each pattern either takes a
character for good or looks at it a bounded number of times.
"""

import re

LONGEST = 300
"""Characters of a common form at the most."""
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
# Without possessive groups: Python 3.11.2 goes on behind a part of one that did not match.
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
