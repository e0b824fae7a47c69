"""The rules of a memory policy on a list of messages, exactly: what `MemoryManager` keeps.

Pure. A run's requests follow the same rules in strides (see `window`).
"""

from collections.abc import Callable, Sequence

from stepfleet.orchestrator.memory.policy import MemoryPolicy
from stepfleet.orchestrator.memory.pruning import estimate_tokens, exchanges, newest_within
from stepfleet.orchestrator.records.conversation.messages import Message

Count = Callable[[Message], int]


def limited(
    messages: Sequence[Message], policy: MemoryPolicy, count: Count = estimate_tokens
) -> tuple[Message, ...]:
    """Return the newest messages within the policy: first its message limit, then its tokens.

    The newest message stays however long it is; calls go with their results. `count` returns
    the tokens of a message.
    """
    system, rest = split(messages, policy)
    if policy.max_messages is not None:
        rest = whole(rest[-policy.max_messages :]) or newest(rest)
    if policy.max_tokens is not None:
        rest = tuple(newest_within(rest, policy.max_tokens - sum(map(count, system)), count))
    return (*system, *rest)


def split(
    messages: Sequence[Message], policy: MemoryPolicy
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Return the system messages that stay in any case, and the others."""
    if not policy.keep_system:
        return (), tuple(messages)
    system = tuple(one for one in messages if one.is_system())
    return system, tuple(one for one in messages if not one.is_system())


def newest(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the newest exchange: one message, or calls with all their results."""
    groups = list(exchanges(messages))
    return tuple(groups[-1]) if groups else ()


def whole(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages from the first on that answers no call that is missing."""
    for start, message in enumerate(messages):
        if not message.is_tool():
            return tuple(messages[start:])
    return ()


def paired(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages without calls that lack a result and results that lack their call.

    An assistant message with text keeps its text.
    """
    kept: list[Message] = []
    for group in exchanges(messages):
        first, results = group[0], [one for one in group[1:] if one.is_tool()]
        if first.is_tool():
            continue
        wanted = [call.id for call in first.tool_calls]
        if wanted == [one.tool_call_id for one in results]:
            kept += group
        elif first.text or not first.tool_calls:
            kept.append(first.model_copy(update={"tool_calls": ()}))
    return tuple(kept)
