"""A user's own memory policy, found by its reference where the agent's code is.

Runs the user's code, and translates its exceptions into `AgentMemoryError`.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from stepfleet.orchestrator.errors import AgentException, AgentMemoryError, ConfigurationError
from stepfleet.orchestrator.memory.limits import paired
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.references import load_reference

CustomPolicy = Callable[
    [Sequence[Message], AgentState], Sequence[Message] | Awaitable[Sequence[Message]]
]


def find_policy(reference: str) -> CustomPolicy:
    """Return the function that `module:attribute` names. Raises `AgentMemoryError`."""
    try:
        found = load_reference(reference, "field 'memory.custom'")
    except ConfigurationError as error:
        raise AgentMemoryError(error.message) from error
    if not callable(found):
        raise AgentMemoryError(f"field 'memory.custom': {reference!r} is no function")
    policy: CustomPolicy = found
    return policy


async def chosen(
    policy: CustomPolicy, messages: Sequence[Message], state: AgentState
) -> tuple[Message, ...]:
    """Return the messages that `policy` selects. Calls and results stay together or go.

    Raises `AgentMemoryError`.
    """
    try:
        selected: Any = policy(messages, state)
        if inspect.isawaitable(selected):
            selected = await selected
        kept = paired(tuple(selected))
    except AgentException:
        raise
    except Exception as error:
        name = getattr(policy, "__qualname__", type(policy).__name__)
        raise AgentMemoryError(f"memory.custom {name} failed: {error!r}") from error
    if not kept:
        raise AgentMemoryError("memory.custom left no message; return at least the newest")
    return kept
