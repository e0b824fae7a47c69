"""A memory that finds notes by their meaning: vectors of an embedding function, and usearch.

Notes travel with their vectors: each worker builds the same index, and none embeds twice.
"""

import base64
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson

from stepfleet.orchestrator.agents.recall.notes import IndexSync, InMemoryNotes, Notes, fitting
from stepfleet.orchestrator.errors import AgentMemoryError, ConfigurationError

Embed = Callable[[Sequence[str]], Awaitable[Sequence[Sequence[float]]]]
NEAREST = 50
"""Notes that are considered for one answer, the nearest first."""


class VectorMemory:
    """Notes that are found again by nearness of meaning (cosine).

    `embed` returns a vector for each text, all of one length. `notes` keeps the notes:
    in this process, or with `RedisNotes` for a whole fleet. Needs the extra `vector`;
    raises `ConfigurationError` without it.
    """

    def __init__(self, embed: Embed, notes: Notes | None = None) -> None:
        try:
            import numpy as np  # noqa: PLC0415 - an extra
            from usearch.index import Index  # noqa: PLC0415 - an extra
        except ImportError:
            msg = "VectorMemory needs usearch: pip install 'stepfleet[vector]'"
            raise ConfigurationError(msg) from None
        self._np: Any = np
        self._new_index: Any = Index
        self._embed = embed
        self._notes = notes or InMemoryNotes()
        self._sync = IndexSync(self._notes, self._take, self._forget)
        self._texts: list[str] = []
        self._index: Any = None

    async def add(self, text: str) -> None:
        """Remember a note; embeds it once."""
        vector = await self._vector(text)
        packed = base64.b64encode(vector.tobytes()).decode()
        await self._notes.append(orjson.dumps({"text": text, "vector": packed}).decode())

    async def get_context(self, query: str, max_tokens: int) -> str:
        """Return the notes nearest to `query`, as far as they fit."""
        vector = await self._vector(query)
        async with self._sync.current():
            if not self._texts:
                return ""
            self._check_length(vector)
            found = self._index.search(vector, min(NEAREST, len(self._texts)), threads=1)
            return fitting((self._texts[int(key)] for key in found.keys), max_tokens)

    async def clear(self) -> None:
        """Forget every note, in every process."""
        await self._notes.clear()

    async def _vector(self, text: str) -> Any:
        vectors = await self._embed([text])
        if len(vectors) != 1:
            raise AgentMemoryError("embed returned not one vector per text")
        vector = self._np.asarray(vectors[0], dtype=self._np.float32)
        if vector.ndim != 1 or not vector.size or not self._np.isfinite(vector).all():
            raise AgentMemoryError("embed returned no vector of finite numbers")
        return vector

    def _take(self, notes: Sequence[str]) -> None:
        stored = [orjson.loads(note) for note in notes]
        vectors = [
            self._np.frombuffer(base64.b64decode(one["vector"]), dtype=self._np.float32)
            for one in stored
        ]
        if self._index is None:
            self._index = self._new_index(ndim=len(vectors[0]), metric="cos", dtype="f32")
        for vector in vectors:
            self._check_length(vector)
        for one, vector in zip(stored, vectors, strict=True):
            self._index.add(len(self._texts), vector, threads=1)
            self._texts.append(one["text"])

    def _forget(self) -> None:
        self._texts.clear()
        self._index = None

    def _check_length(self, vector: Any) -> None:
        if len(vector) != self._index.ndim:
            raise AgentMemoryError(
                f"a vector has {len(vector)} numbers, the notes' have {self._index.ndim}: notes of "
                "another embedding model are stored; clear them or use another name"
            )
