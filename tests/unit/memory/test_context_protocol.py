import asyncio

import pytest

from stepfleet.orchestrator import Memory, Message, StoreError
from stepfleet.orchestrator.agents.recall import InMemoryNotes, KeywordMemory, fitting
from stepfleet.orchestrator.errors import AgentMemoryError
from stepfleet.orchestrator.memory import policy as protocol
from stepfleet.orchestrator.memory.policy import CONTEXT, context_for

ASKED = (Message.system("rules"), Message.user("about cats"), Message.assistant("hm"))


class Broken:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def add(self, text: str) -> None:
        raise self.error

    async def get_context(self, query: str, max_tokens: int) -> str:
        raise self.error

    async def clear(self) -> None:
        raise self.error


async def test_the_newest_question_is_looked_up() -> None:
    """MEM-11"""
    memory = KeywordMemory()
    await memory.add("cats sleep a lot")
    await memory.add("trains are late")
    note = await context_for(memory, ASKED, 100)
    assert note == Message.added(f"{CONTEXT}- cats sleep a lot", "memory")
    assert await context_for(memory, (Message.system("cats"),), 100) is None
    assert await context_for(memory, (Message.user("dogs"),), 100) is None


async def test_what_goes_wrong_in_a_memory_is_a_memory_error() -> None:
    """MEM-14"""
    with pytest.raises(AgentMemoryError, match="memory Broken failed: OSError: no disk"):
        await context_for(Broken(OSError("no disk")), ASKED, 100)
    with pytest.raises(StoreError, match="away"):
        await context_for(Broken(StoreError("away")), ASKED, 100)


async def test_a_memory_that_gives_no_answer_is_left_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MEM-14"""

    class Silent(KeywordMemory):
        async def get_context(self, query: str, max_tokens: int) -> str:
            await asyncio.Event().wait()
            raise AssertionError(query, max_tokens)

    monkeypatch.setattr(protocol, "LONGEST", 0.01)
    with pytest.raises(AgentMemoryError, match="memory Silent gave no answer within"):
        await context_for(Silent(), ASKED, 100)


def test_implementations_follow_the_protocol() -> None:
    """MEM-11"""
    assert isinstance(KeywordMemory(), Memory)
    assert not isinstance(InMemoryNotes(), Memory)


def test_notes_that_do_not_fit_are_left_out() -> None:
    """MEM-11"""
    notes = ["first of all", "x" * 500, "and another"]
    assert fitting(notes, 20) == "- first of all\n- and another"
    assert fitting(notes, 1) == ""
