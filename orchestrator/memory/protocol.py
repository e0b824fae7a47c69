"""Memory beyond a conversation: the protocol of an agent's `context`."""

import asyncio
from typing import Protocol, runtime_checkable

from stepfleet.orchestrator.errors import AgentException, AgentMemoryError
from stepfleet.orchestrator.records.conversation.messages import Message

LONGEST = 10.0
"""Seconds that a step waits for a memory's answer."""
CONTEXT = "Notes from memory that may help:\n"


@runtime_checkable
class Memory(Protocol):
    """Notes that outlive a conversation. Implementations may serve many runs at once."""

    async def add(self, text: str) -> None:
        """Remember a note."""
        ...

    async def get_context(self, query: str, max_tokens: int) -> str:
        """Return the notes that fit `query` best, in at most `max_tokens` tokens; '' for none."""
        ...

    async def clear(self) -> None:
        """Forget every note."""
        ...


async def context_for(
    memory: Memory, messages: tuple[Message, ...], max_tokens: int
) -> Message | None:
    """Return the notes for a request, as a message for its end, where no prefix changes.

    The newest user message is the query. Raises `AgentMemoryError` when the memory fails.
    """
    query = next((one.text for one in reversed(messages) if one.is_prompt() and one.text), "")
    if not query:
        return None
    try:
        async with asyncio.timeout(LONGEST):
            found = await memory.get_context(query, max_tokens)
    except AgentException:
        raise
    except TimeoutError:
        msg = f"memory {type(memory).__name__} gave no answer within {LONGEST:g} s"
        raise AgentMemoryError(msg) from None
    except Exception as error:
        msg = f"memory {type(memory).__name__} failed: {type(error).__name__}: {error}"
        raise AgentMemoryError(msg) from error
    return Message.added(CONTEXT + found, "memory") if found else None
