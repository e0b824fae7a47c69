"""A memory that finds notes by the words they share with a question. Needs no library."""

import heapq
import math
import re
from collections.abc import Sequence

from stepfleet.orchestrator.agents.recall.notes import IndexSync, InMemoryNotes, Notes, fitting

_WORD = re.compile(r"\w+")
MOST = 100
"""Notes that are considered for one answer, the best first."""


class KeywordMemory:
    """Notes that are found again by their words; rare words count more, newer notes win ties.

    `notes` keeps them: in this process, or with `RedisNotes` for a whole fleet.
    """

    def __init__(self, notes: Notes | None = None) -> None:
        self._notes = notes or InMemoryNotes()
        self._sync = IndexSync(self._notes, self._take, self._forget)
        self._texts: list[str] = []
        self._places: dict[str, list[int]] = {}

    async def add(self, text: str) -> None:
        """Remember a note."""
        await self._notes.append(text)

    async def get_context(self, query: str, max_tokens: int) -> str:
        """Return the notes that share words with `query`, as far as they fit."""
        async with self._sync.current():
            return fitting(self._best(query), max_tokens)

    async def clear(self) -> None:
        """Forget every note, in every process."""
        await self._notes.clear()

    def _best(self, query: str) -> list[str]:
        scores: dict[int, float] = {}
        for word in set(_words(query)):
            found = self._places.get(word, ())
            weight = math.log1p(len(self._texts) / len(found)) if found else 0.0
            for place in found:
                scores[place] = scores.get(place, 0.0) + weight
        best = heapq.nlargest(MOST, scores, key=lambda place: (scores[place], place))
        return [self._texts[place] for place in best]

    def _take(self, notes: Sequence[str]) -> None:
        for text in notes:
            for word in set(_words(text)):
                self._places.setdefault(word, []).append(len(self._texts))
            self._texts.append(text)

    def _forget(self) -> None:
        self._texts.clear()
        self._places.clear()


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())
