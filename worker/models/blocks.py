"""Fits the blocks of a conversation to what a service takes, before its format writes them. Pure.

Media of a tool's result stand in the result where the service nests them, and follow the results
in a user message where it does not. A block that the service lacks becomes a sentence that says
so: a run that meets one half-way goes on.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

from stepfleet.orchestrator.models.media import media_of, normalized_block
from stepfleet.orchestrator.models.support import Support
from stepfleet.orchestrator.records.conversation.messages import ADDED, Block, Message
from stepfleet.orchestrator.records.conversation.tool_text import SHOWN_FOR, TOOLS


def fitted(messages: tuple[Message, ...], support: Support) -> tuple[Message, ...]:
    """Return the messages with blocks that the service takes, in the places where it does."""
    if all(isinstance(one.content, str) for one in messages):
        return messages
    return tuple(_placed([_carried(one, support) for one in messages], support))


def _carried(message: Message, support: Support) -> Message:
    if isinstance(message.content, str):
        return message
    blocks = [_block(block, support) for block in message.content]
    return message if blocks == message.content else message.model_copy(update={"content": blocks})


def _block(block: Block, support: Support) -> Block:
    try:
        found = normalized_block(block)
        media = media_of(found)
    except ValueError as error:
        return {"text": f"[left out: {error}]"}
    if isinstance(result := found.get("toolResult"), dict):
        content = result.get("content")
        inner = [_block(one, support) for one in content] if isinstance(content, list) else content
        return {**found, "toolResult": {**result, "content": inner}}
    if media is None:
        return found
    if lack := support.lack(media):
        return {"text": f"[{media} left out: {lack}]"}
    if media.source == "text" and "text" not in support.result_media.get("document", ()):
        return {"text": f"{media.name}:\n\n{media.value}"}
    return found


def _placed(messages: Iterable[Message], support: Support) -> Iterator[Message]:
    results: list[Message] = []
    for message in messages:
        if message.is_tool():
            results.append(message)
            continue
        shown = message
        if results and message.metadata.get(ADDED) == TOOLS:
            results, shown = _nested(results, message, support)
        yield from _without_media(results, support)
        results = []
        if shown is message or shown.content:
            yield _with_plain_results(shown, support)
    yield from _without_media(results, support)


def _nested(
    results: list[Message], message: Message, support: Support
) -> tuple[list[Message], Message]:
    """Return the results with the media that were shown for them, and the message without."""
    calls, blocks = message.metadata.get(SHOWN_FOR), message.content
    if not isinstance(calls, list) or isinstance(blocks, str) or len(calls) != len(blocks):
        return results, message
    answered = {one.tool_call_id for one in results}
    taken: dict[str, list[Block]] = {}
    kept: list[Block] = []
    for call, group in groupby(zip(calls, blocks, strict=True), itemgetter(0)):
        caption, *media = (block for _, block in group)
        if call in answered and not _apart(media, support):
            taken[call] = media
        else:
            kept += [caption, *media]
    whole = [_with_media(one, taken.get(one.tool_call_id or "", [])) for one in results]
    return whole, message.model_copy(update={"content": kept})


def _with_media(message: Message, media: list[Block]) -> Message:
    content = message.content
    blocks = [{"text": content}] if isinstance(content, str) and content else list(content)
    return message.model_copy(update={"content": [*blocks, *media]}) if media else message


def _apart(blocks: Any, support: Support) -> list[Block]:
    """Return the media that cannot stand in a tool's result."""
    media = [(one, media_of(one)) for one in (blocks if isinstance(blocks, list) else ())]
    return [
        block
        for block, found in media
        if found and found.source not in support.result_media.get(found.kind, ())
    ]


def _without_media(results: list[Message], support: Support) -> Iterator[Message]:
    """Yield results, then a user message with the media that cannot stand in them."""
    follow: list[Block] = []
    for message in results:
        apart = _apart(message.content, support)
        if apart:
            rest = [block for block in message.content if block not in apart]
            yield message.model_copy(update={"content": rest or ""})
            follow += _shown(message.tool_call_id, apart)
        else:
            yield message
    if follow:
        yield Message.added(follow, by=TOOLS)


def _with_plain_results(message: Message, support: Support) -> Message:
    """Return a message whose `toolResult` blocks have only media that may stand there."""
    blocks = message.content if isinstance(message.content, list) else []
    kept: list[Block] = []
    follow: list[Block] = []
    for block in blocks:
        result = block.get("toolResult") or {}
        apart = _apart(result.get("content"), support)
        if apart:
            rest = [one for one in result["content"] if one not in apart]
            kept.append({**block, "toolResult": {**result, "content": rest}})
            follow += _shown(result.get("toolUseId"), apart)
        else:
            kept.append(block)
    return message.model_copy(update={"content": [*kept, *follow]}) if follow else message


def _shown(call_id: str | None, media: list[Block]) -> list[Block]:
    return [{"text": f"Shown by call {call_id}:"}, *media]
