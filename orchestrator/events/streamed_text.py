"""Folds chunks of text into the text so far; repeated and late chunks change nothing. Pure."""

from collections.abc import Mapping
from typing import Any

from stepfleet.orchestrator.events.envelope import EventType


class StreamedText:
    """The text of a run's model calls by step, folded from its chunks.

    A new attempt at a step starts its text anew; late chunks of an older attempt, and chunks
    that were seen before, change nothing.
    """

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._attempts: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self._open: set[int] = set()

    @property
    def text(self) -> str:
        """The text of the newest step."""
        return self._texts[max(self._texts)] if self._texts else ""

    @property
    def is_open(self) -> bool:
        """Whether the newest step's text is still being written."""
        return bool(self._texts) and max(self._texts) in self._open

    def is_whole(self, step: int) -> bool:
        """Return whether a step's text is known to its end; true for 0, before the first step."""
        return step == 0 or (step in self._texts and step not in self._open)

    def of(self, step: int) -> str:
        """Return the text of a step (from 1), as far as it is known."""
        return self._texts.get(step, "")

    def add(self, envelope: Mapping[str, Any]) -> bool:
        """Take an envelope of any type; return whether the text has changed."""
        if envelope["type"] != EventType.STREAM_CHUNK:
            return False
        chunk = envelope["payload"]
        step, attempt, index = chunk["step_number"], chunk["attempt"], chunk["chunk_index"]
        known = self._attempts.get(step, 0)
        if attempt < known or (attempt == known and index < self._next[step]):
            return False
        before = self.of(step) if attempt == known else ""
        is_new = before != self.of(step) or bool(chunk["chunk"])
        self._texts[step] = before + chunk["chunk"]
        self._attempts[step], self._next[step] = attempt, index + 1
        (self._open.discard if chunk["is_complete"] else self._open.add)(step)
        return is_new
