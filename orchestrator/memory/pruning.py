"""Shortens a conversation to a number of tokens without parting calls from their results."""

from collections.abc import Iterator, Sequence

from stepfleet.orchestrator.records.messages import Message

CHARACTERS_PER_TOKEN = 4
OVERHEAD = 4
UNKNOWN_LIMIT_SHARE = 0.5


def estimate_tokens(message: Message) -> int:
    """Return about how many tokens a message takes: four characters each, plus its frame."""
    characters = (
        len(message.text) if isinstance(message.content, str) else len(str(message.content))
    )
    for call in message.tool_calls:
        characters += len(call.name) + len(str(call.arguments))
    return OVERHEAD + characters // CHARACTERS_PER_TOKEN


def prune_to_token_limit(messages: Sequence[Message], limit: int | None) -> tuple[Message, ...]:
    """Return `messages` without the oldest exchanges, so that about `limit` tokens are left.

    Leading system messages and the first user message, which is the task, stay; a call goes
    only together with its results; the newest exchange always stays. Without a known limit
    half of the tokens are kept.
    """
    head = next((i for i, one in enumerate(messages) if not one.is_system()), len(messages))
    if head < len(messages) and messages[head].is_user():
        head += 1
    pinned, rest = messages[:head], messages[head:]
    total = sum(map(estimate_tokens, messages))
    budget = limit if limit is not None else int(total * UNKNOWN_LIMIT_SHARE)
    groups = list(_exchanges(rest))
    while len(groups) > 1 and total > budget:
        total -= sum(map(estimate_tokens, groups.pop(0)))
    return (*pinned, *(message for group in groups for message in group))


def _exchanges(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Split into what must stay together: a message, or calls with all their results."""
    group: list[Message] = []
    for message in messages:
        if group and not message.is_tool():
            yield group
            group = []
        group.append(message)
    if group:
        yield group
