"""Memories that outlive a conversation, for an agent's `context`: notes, words, vectors.

Notes travel with their vectors: each worker builds the same index, and none embeds twice.
"""

import asyncio
import base64
import heapq
import math
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import httpx
import orjson

from stepfleet.orchestrator.errors import AgentMemoryError, ConfigurationError
from stepfleet.orchestrator.memory.pruning import text_tokens
from stepfleet.orchestrator.records.text.redaction import name_secret, redact
from stepfleet.orchestrator.redis_client.clients import client_of
from stepfleet.orchestrator.redis_client.urls import usable_url
from stepfleet.orchestrator.settings.settings import load_settings

PAGE = 1000


START = ""
AT_ONCE = 20
"""So many notes are indexed without a thread."""

T = TypeVar("T")
Take = Callable[[Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class NotesPage:
    """Notes after a position, and the position after them.

    `cleared` is true where all earlier notes were cleared; then these begin at the start.
    """

    notes: tuple[str, ...]
    place: str
    cleared: bool = False


class Notes(Protocol):
    """A store of notes. `START` is the place before the first."""

    async def append(self, note: str) -> None:
        """Append a note."""

    async def after(self, place: str) -> NotesPage:
        """Return some notes after `place`; none at the end."""

    async def clear(self) -> None:
        """Remove all notes."""


class InMemoryNotes:
    """Notes in this process."""

    def __init__(self) -> None:
        self._notes: list[str] = []
        self._generation = 0

    async def append(self, note: str) -> None:
        """Append a note."""
        self._notes.append(note)

    async def after(self, place: str) -> NotesPage:
        """Return the notes after `place`."""
        generation, _, number = place.partition(":")
        cleared = place != START and generation != str(self._generation)
        start = int(number or 0) if not cleared else 0
        notes = tuple(self._notes[start:])
        return NotesPage(notes, f"{self._generation}:{start + len(notes)}", cleared)

    async def clear(self) -> None:
        """Remove all notes."""
        self._notes.clear()
        self._generation += 1


class OnePerLoop(Generic[T]):
    """Makes an object at its first use in a loop and returns the same one from then on."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()

    def get(self) -> T:
        """Return this loop's object."""
        loop = asyncio.get_running_loop()
        found = self._made.get(loop)
        if found is None:
            found = self._made[loop] = self._make()
        return found

    async def close(self, close: Callable[[T], Awaitable[None]]) -> None:
        """Close this loop's object, if it has one."""
        found = self._made.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await close(found)


class IndexSync:
    """Passes each new note of `notes` to `take` once; `forget` is called when they were cleared.

    For the coroutines of one event loop.
    """

    def __init__(self, notes: Notes, take: Take, forget: Callable[[], None]) -> None:
        self._notes = notes
        self._take = take
        self._forget = forget
        self._place = START
        self._locks: OnePerLoop[asyncio.Lock] = OnePerLoop(asyncio.Lock)

    @asynccontextmanager
    async def current(self) -> AsyncIterator[None]:
        """Bring the index up to date and lock it for the block."""
        async with self._locks.get():
            await self._catch_up()
            yield

    async def _catch_up(self) -> None:
        while True:
            page = await self._notes.after(self._place)
            if page.cleared:
                self._forget()
            if not page.notes:
                self._place = page.place
                return
            if len(page.notes) <= AT_ONCE:
                self._take(page.notes)
            else:  # other steps use the event loop meanwhile
                await asyncio.to_thread(self._take, page.notes)
            self._place = page.place


def fitting(notes: Iterable[str], max_tokens: int) -> str:
    """Return the notes, the best first, as far as they fit into `max_tokens` tokens (estimated)."""
    room = max_tokens
    lines: list[str] = []
    for note in notes:
        line = f"- {note}"
        size = text_tokens(line) + 1
        if size <= room:
            lines.append(line)
            room -= size
    return "\n".join(lines)


class RedisNotes:
    """Notes under `name` in the Redis at `url`; the newest `most` of them are kept.

    Belongs to no run and never expires. Connects at its first use in an event loop; nothing is
    sent before. `prefix` begins the keys (default: `STEPFLEET_PREFIX`). Raises
    `ConfigurationError` for an unusable URL.
    """

    def __init__(
        self, url: str, name: str = "notes", *, most: int = 10_000, prefix: str | None = None
    ) -> None:
        try:
            address = usable_url(url)
        except ValueError as error:
            raise ConfigurationError(f"the URL of RedisNotes: {error}") from None
        self._name = name
        self._prefix = prefix
        self._most = most
        self._clients: OnePerLoop[Any] = OnePerLoop(
            lambda: client_of(address, decode_responses=True)
        )

    @cached_property
    def _key(self) -> str:
        prefix = load_settings().prefix if self._prefix is None else self._prefix
        return f"{prefix}sf:notes:{{{self._name}}}"

    @property
    def _generation_key(self) -> str:
        return f"{self._key}:generation"

    async def append(self, note: str) -> None:
        """Append a note."""
        await self._clients.get().xadd(self._key, {"note": note}, maxlen=self._most)

    async def after(self, place: str) -> NotesPage:
        """Return up to a thousand notes after `place`."""
        generation, _, seen = place.partition(":")
        found, now = await self._read(f"({seen}" if seen else "-")
        cleared = place != START and generation != now
        if cleared:
            found, now = await self._read("-")
        last = found[-1][0] if found else ("" if cleared else seen)
        return NotesPage(tuple(fields["note"] for _, fields in found), f"{now}:{last}", cleared)

    async def clear(self) -> None:
        """Remove all notes."""
        async with self._clients.get().pipeline(transaction=True) as pipe:
            pipe.delete(self._key)
            pipe.incr(self._generation_key)
            await pipe.execute()

    async def aclose(self) -> None:
        """Disconnect in this event loop."""
        await self._clients.close(lambda client: client.aclose())

    async def _read(self, start: str) -> tuple[list[Any], str]:
        async with self._clients.get().pipeline(transaction=True) as pipe:
            pipe.xrange(self._key, min=start, count=PAGE)
            pipe.get(self._generation_key)
            found, generation = await pipe.execute()
        return found, str(generation or 0)


OPENAI = "https://api.openai.com/v1"


class OpenAIEmbeddings:
    """An embedding function for `VectorMemory`.

    The key is read from the environment variable `api_key_env` at each call; a server without
    keys needs none. `timeout` is in seconds. Raises `AgentMemoryError` when the server fails.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str = OPENAI,
        api_key_env: str = "OPENAI_API_KEY",
        timeout: float = 10.0,
    ) -> None:
        self._model = model
        self._url = f"{base_url.rstrip('/')}/embeddings"
        self._api_key_env = api_key_env
        self._clients = OnePerLoop(lambda: httpx.AsyncClient(timeout=timeout))

    async def __call__(self, texts: Sequence[str]) -> list[list[float]]:
        """Return one vector per text, in their order."""
        name_secret(self._api_key_env)
        key = os.environ.get(self._api_key_env, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"model": self._model, "input": list(texts)}
        try:
            reply = await self._clients.get().post(self._url, json=body, headers=headers)
            reply.raise_for_status()
            data: list[dict[str, Any]] = reply.json()["data"]
            ordered = sorted(data, key=lambda one: one["index"])
            return [list(map(float, one["embedding"])) for one in ordered]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            why = redact(f"{type(error).__name__}: {error}"[:500])
            raise AgentMemoryError(f"embeddings of {self._model!r} failed: {why}") from error

    async def aclose(self) -> None:
        """Disconnect in this event loop."""
        await self._clients.close(lambda client: client.aclose())


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
            raise AgentMemoryError("embed must return one vector per text")
        vector = self._np.asarray(vectors[0], dtype=self._np.float32)
        if vector.ndim != 1 or not vector.size or not self._np.isfinite(vector).all():
            raise AgentMemoryError("embed must return vectors of finite numbers")
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
