"""Foreign data as a browser shows it. Pure. For texts, pages of ours have the same in `dom.js`."""

from typing import Any

MOST_EXACT = 2**53 - 1
"""The largest whole number that JavaScript does not round."""


def exact_in_browsers(value: Any) -> Any:
    """Return JSON data whose whole numbers a browser would round as text; a copy.

    A person who approves a payment reads its amount.
    """
    if isinstance(value, dict):
        return {name: exact_in_browsers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [exact_in_browsers(one) for one in value]
    is_rounded = isinstance(value, int) and abs(value) > MOST_EXACT
    return str(value) if is_rounded else value


def visible(text: str) -> str:
    """Return a text whose characters can all be seen, as the command line shows it.

    Others could hide words, or turn around those beside them.
    """
    return "".join(
        one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text
    )
