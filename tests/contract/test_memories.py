"""One suite over every memory: words and vectors, in this process and in Redis."""

from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from stepfleet.orchestrator import Memory
from stepfleet.orchestrator.agents.recall import (
    PAGE,
    InMemoryNotes,
    KeywordMemory,
    Notes,
    RedisNotes,
    VectorMemory,
)
from stepfleet.orchestrator.errors import AgentMemoryError

WORDS = ["cats", "sleep", "trains", "late", "soup", "salt"]


async def by_words(texts: Sequence[str]) -> list[list[float]]:
    """Return how often each of a few words occurs: near means the same words."""
    return [[text.count(word) + 0.01 for word in WORDS] for text in texts]


Make = Callable[[Notes], Memory]
MAKERS: dict[str, Make] = {
    "words": KeywordMemory,
    "vectors": lambda notes: VectorMemory(by_words, notes),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


@pytest.fixture(params=["in memory", "redis"])
async def notes(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Notes]:
    if request.param == "in memory":
        yield InMemoryNotes()
        return
    kept = RedisNotes(redis_url, "suite")
    yield kept
    await kept.aclose()


async def test_the_best_note_comes_first_and_fits(make: Make, notes: Notes) -> None:
    """MEM-11, MEM-12: the nearest stored note is returned within max_tokens."""
    memory = make(notes)
    for text in ("cats sleep a lot", "trains are late", "soup needs salt"):
        await memory.add(text)
    assert (await memory.get_context("when are trains late", 100)).startswith("- trains are late")
    assert await memory.get_context("when are trains late", 5) == "- trains are late"
    assert await memory.get_context("when are trains late", 1) == ""


async def test_without_notes_there_is_no_context(make: Make, notes: Notes) -> None:
    """MEM-11"""
    assert await make(notes).get_context("cats", 100) == ""


async def test_clearing_forgets_everything_for_everybody(make: Make, notes: Notes) -> None:
    """MEM-11"""
    memory, other = make(notes), make(notes)
    await memory.add("cats sleep")
    assert await other.get_context("cats", 100) == "- cats sleep"
    await memory.clear()
    assert await other.get_context("cats", 100) == ""
    await other.add("cats late")
    assert await memory.get_context("cats", 100) == "- cats late"


async def test_many_notes_are_read_in_pages(redis_url: str) -> None:
    notes = RedisNotes(redis_url, "many")
    try:
        for number in range(PAGE + 5):
            await notes.append(f"note {number}")
        first = await notes.after("")
        second = await notes.after(first.place)
        third = await notes.after(second.place)
        assert [len(page.notes) for page in (first, second, third)] == [PAGE, 5, 0]
        memory = KeywordMemory(notes)
        assert await memory.get_context(str(PAGE + 3), 100) == f"- note {PAGE + 3}"
    finally:
        await notes.aclose()


async def test_vectors_of_another_length_are_refused() -> None:
    """MEM-12"""
    lengths = iter([3, 3, 2])

    async def embed(texts: Sequence[str]) -> list[list[float]]:
        length = next(lengths)
        return [[1.0] * length for _ in texts]

    memory = VectorMemory(embed)
    await memory.add("one")
    assert await memory.get_context("one", 50) == "- one"
    with pytest.raises(AgentMemoryError, match="has 2 numbers, the notes' have 3"):
        await memory.get_context("one", 50)


@pytest.mark.parametrize("vectors", [[], [[]], [[float("nan")]], [[1.0], [2.0]]])
async def test_what_is_no_vector_is_refused(vectors: list[list[float]]) -> None:
    """MEM-12, MEM-14"""

    async def embed(_: Sequence[str]) -> list[list[float]]:
        return vectors

    with pytest.raises(AgentMemoryError, match="embed must return"):
        await VectorMemory(embed).add("one")
