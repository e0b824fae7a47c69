"""Thoughts that stand before an answer's text, as `<think>...</think>`. Pure.

Open models write them so, and servers that do not part them from the text send them in it.
"""

import re

CUT = frozenset({"length", "max_tokens", "model_length", "max_output_tokens"})
"""Finish reasons of answers that were cut at their limit of tokens."""
_BEGIN, _END = "<think>", "</think>"
_MOST_BLANKS = 64
_THOUGHT = re.compile(rf"\s{{0,{_MOST_BLANKS}}}{_BEGIN}(.*?)(?:{_END}\s*|\Z)", re.DOTALL)
_WITHOUT_TAGS = ("openai", "azure")
"""Services whose own models write no such tags: there they are text that somebody asked for."""


def has_tags(service: str) -> bool:
    """Return whether texts of a service may begin with a thought."""
    return service not in _WITHOUT_TAGS


def leading_thought(text: str, *, is_open: bool) -> re.Match[str] | None:
    """Return the thought that a text begins with, without its tags the match's only group.

    `is_open`: it may lack its end, as where the answer was cut or calls follow.
    """
    found = _THOUGHT.match(text)
    return found if found and (is_open or found[0].rstrip().endswith(_END)) else None


class LeadingThought:
    """Passes the pieces of a text on, without the thought that it begins with."""

    def __init__(self) -> None:
        self.is_open = True
        """Whether all so far is of a thought, or may be."""
        self._is_thought = False
        self._has_text = False
        self._held = ""
        """What may be a part of a tag."""

    def add(self, piece: str) -> str:
        """Add a piece and return what is to be told."""
        if self._has_text:
            return piece
        held = self._held + piece
        if not self._is_thought:
            begin = held.lstrip()
            if _BEGIN.startswith(begin[: len(_BEGIN)]) and len(held) - len(begin) <= _MOST_BLANKS:
                self._is_thought = len(begin) >= len(_BEGIN)
            else:
                self.is_open, self._has_text = False, True
                return held
            if not self._is_thought:
                self._held = held
                return ""
        return self._after(held) if self.is_open else self._text(held)

    def _after(self, held: str) -> str:
        """Return the text behind the end of the thought, once that has come."""
        _, end, text = held.partition(_END)
        self.is_open = not end
        self._held = "" if end else held[1 - len(_END) :]
        return self._text(text)

    def _text(self, piece: str) -> str:
        text = piece.lstrip()
        self._has_text = bool(text)
        return text
