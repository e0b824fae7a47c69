"""What an agent shows its model of its conversation: the storable policy, and memories of its own.

Decides nothing by itself; `window` and `pruning` apply it.
"""

import asyncio
from functools import cached_property
from typing import Protocol, Self, runtime_checkable

from pydantic import Field, model_validator

from stepfleet.orchestrator.errors import AgentException, AgentMemoryError
from stepfleet.orchestrator.records.base import Record
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


class MemoryPolicy(Record):
    """Limits of what a request holds. None switches a rule off; without rules all is sent.

    `max_messages` counts messages; `max_tokens` tokens of the whole request's messages.
    `summarize_after` replaces what is left out by a summary as soon as there are more messages
    than that; it is made by `summary_model`, or else by the run's own. With `keep_system` the
    instructions stay whatever is left out, and do not count as messages. `custom` names a
    function as `module:attribute`, which sees the messages last and returns those to send.
    `context_tokens` is how much of a request the agent's `context` memory may fill. With
    `trim_log` the store forgets the steps that no request shows any more.
    """

    max_messages: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    summarize_after: int | None = Field(default=None, ge=2)
    keep_system: bool = True
    summary_model: str | None = Field(default=None, min_length=1)
    custom: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    context_tokens: int = Field(default=1000, ge=1)
    trim_log: bool = False

    @model_validator(mode="after")
    def _rules_fit(self) -> Self:
        after, most = self.summarize_after, self.max_messages
        if after is not None and most is not None and after >= most:
            msg = (
                f"summarize_after ({after}) must be below max_messages ({most}), or the limit "
                "drops what was to be summarized"
            )
            raise ValueError(msg)
        return self

    @cached_property
    def active(self) -> bool:
        """Whether any rule is on."""
        rules = (self.max_messages, self.max_tokens, self.summarize_after, self.custom)
        return any(rule is not None for rule in rules) or not self.keep_system
