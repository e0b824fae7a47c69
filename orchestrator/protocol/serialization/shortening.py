"""Which messages a snapshot keeps and how long their texts are. Pure.

The instructions at the head of a conversation stay, and calls go only together with their results.
"""

import json
from collections.abc import Sequence
from typing import Any

from stepfleet.orchestrator.records.messages import Block, Content, Message

MARK = "..."
OMITTED_RESULT = "[tool result omitted]"


def newest_messages(messages: Sequence[Message], limit: int) -> tuple[Message, ...]:
    """Return at most `limit` messages: the instructions in front, then the newest ones.

    A result whose call is no longer there is left out too.
    """
    if limit <= 0:
        return ()
    if len(messages) <= limit:
        return tuple(messages)
    head = next((i for i, one in enumerate(messages) if not one.is_system()), len(messages))
    pinned = messages[: min(head, limit)]
    first = max(len(messages) - (limit - len(pinned)), head)
    while first < len(messages) and messages[first].is_tool():
        first += 1
    return (*pinned, *messages[first:])


def shortened(content: Content, limit: int) -> Content:
    """Return content whose texts have at most `limit` characters in all, cut ones marked."""
    if isinstance(content, str):
        return cut(content, limit)
    left, kept = limit, []
    for block in content:
        if not isinstance(block.get("text"), str):
            kept.append(_small(block, limit))
        elif left > 0:
            kept.append({**block, "text": cut(block["text"], left)})
            left -= len(block["text"])
    return kept


def cut(text: str, limit: int) -> str:
    """Return `text`, or its first `limit` characters and the mark."""
    return text if len(text) <= limit else text[: max(limit, 0)] + MARK


def shortened_arguments(value: Any, limit: int) -> Any:
    """Return a call's arguments with each text in them cut."""
    match value:
        case str():
            return cut(value, limit)
        case dict():
            return {name: shortened_arguments(one, limit) for name, one in value.items()}
        case list():
            return [shortened_arguments(one, limit) for one in value]
        case _:
            return value


def _small(block: Block, limit: int) -> Block:
    """Return a block of another kind, or a note that it was too large to keep."""
    if len(json.dumps(block, ensure_ascii=False, default=str)) <= limit:
        return dict(block)
    kind = next(iter(block), "content")
    return {"text": f"[{kind} omitted]"}
