"""Shortens a conversation to limits of messages and tokens; calls stay with their results."""

import inspect
import string
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from stepfleet.orchestrator.errors import AgentException, AgentMemoryError, ConfigurationError
from stepfleet.orchestrator.memory.policy import MemoryPolicy
from stepfleet.orchestrator.records.conversation.messages import REASONING, Block, Message
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.references import load_reference

OVERHEAD = 4
BLOCK = 1000
UNKNOWN_LIMIT_SHARE = 0.5
_DENSE = (string.punctuation + string.digits).encode()
_HIGH = bytes(range(128, 256))


def estimate_tokens(message: Message) -> int:
    """Return about how many tokens a message takes: those of its text and calls, and its frame.

    An image or another block without text counts as a thousand, reasoning as no more.
    """
    tokens = OVERHEAD + text_tokens(message.text)
    if not isinstance(message.content, str):
        tokens += sum(map(_block_tokens, message.content))
    for call in message.tool_calls:
        tokens += text_tokens(call.name) + text_tokens(str(call.arguments))
    return tokens


def _block_tokens(block: Block) -> int:
    if "text" in block:
        return 0
    if REASONING in block:
        return min(text_tokens(str(block[REASONING])[: 8 * BLOCK]), BLOCK)
    return BLOCK


def text_tokens(text: str) -> int:
    """Return about how many tokens a text takes, within some thirty percent for common languages.

    Five letters or spaces make a token, and so do not quite two digits or punctuation marks (JSON
    is dense), and four bytes of other scripts.
    """
    data = text.encode(errors="surrogatepass")
    high = 0 if text.isascii() else len(data) - len(data.translate(None, _HIGH))
    dense = len(data) - len(data.translate(None, _DENSE))
    plain = len(data) - dense - high
    return (plain * 12 + dense * 36 + high * 15) // 60


def prune_to_token_limit(messages: Sequence[Message], limit: int | None) -> tuple[Message, ...]:
    """Return `messages` without the oldest exchanges, so that about `limit` tokens are left.

    Leading system messages, a summary and the first user message, the task, stay; a call goes
    only together with its results; the newest exchange always stays. Without a known limit
    half of the tokens are kept.
    """
    head = _head(messages)
    pinned, rest = messages[:head], messages[head:]
    if limit is None:
        limit = int(sum(map(estimate_tokens, messages)) * UNKNOWN_LIMIT_SHARE)
    budget = limit - sum(map(estimate_tokens, pinned))
    return (*pinned, *newest_within(rest, budget, estimate_tokens))


def newest_within(
    messages: Sequence[Message], budget: int, count: Callable[[Message], int]
) -> Iterator[Message]:
    """Yield the newest exchanges that fit a budget of tokens; the newest one always."""
    groups = list(exchanges(messages))
    sizes = [sum(map(count, group)) for group in groups]
    total, start = sum(sizes), 0
    while start < len(groups) - 1 and total > budget:
        total -= sizes[start]
        start += 1
    for group in groups[start:]:
        yield from group


def exchanges(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Split into what must stay together: a message, or calls with all their results.

    A message that a part of the fleet added stays with the one before it.
    """
    group: list[Message] = []
    for message in messages:
        if group and not message.is_tool() and not _is_added(message):
            yield group
            group = []
        group.append(message)
    if group:
        yield group


def _head(messages: Sequence[Message]) -> int:
    """Return how many messages at the beginning stay in any case."""
    for place, message in enumerate(messages):
        if message.is_prompt():
            return place + 1
        if not message.is_system() and not _is_added(message):
            return place
    return len(messages)


def _is_added(message: Message) -> bool:
    return message.is_user() and not message.is_prompt()


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
        raise AgentMemoryError(f"field 'memory.custom': {reference!r} is not a function")
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
