"""Fits the blocks of a conversation to what a service takes, before its format writes them. Pure.

Media of a tool's result stand in the result where the service nests them, and follow the results
in a user message where it does not. A block that the service lacks becomes a sentence that says
so: a run that meets one half-way goes on.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

from stepfleet.orchestrator.models.media import media_of, normalized_block
from stepfleet.orchestrator.models.support import Support
from stepfleet.orchestrator.records.conversation.blocks import CALL, RESULT
from stepfleet.orchestrator.records.conversation.messages import (
    ADDED,
    SHOWN_FOR,
    TOOLS,
    Block,
    Message,
)
from stepfleet.worker.attempt.sanitize import own_id

_ID = "toolUseId"


def with_sent_ids(messages: tuple[Message, ...], fits: re.Pattern[str]) -> tuple[Message, ...]:
    """Return the messages with ids that `fits` matches whole, and no two calls with the same.

    A result belongs to the newest call before it that has its id; to one after the other, where
    calls of one answer share it. Messages that need no change are the same objects.
    """
    if _may_stay(messages, fits):
        return messages
    ids = _SentIds(fits)
    return tuple(map(ids.of, messages))


def _may_stay(messages: tuple[Message, ...], fits: re.Pattern[str]) -> bool:
    """Return whether all ids of calls fit, each of one call: nearly always, and at every step."""
    used: set[str | None] = {None}
    for message in messages:
        for call in message.tool_calls:
            if call.id in used or not fits.fullmatch(call.id):
                return False
            used.add(call.id)
        if message.tool_call_id not in used:
            return False
        content = message.content
        if isinstance(content, list) and any(CALL in one or RESULT in one for one in content):
            return False
    return True


class _SentIds:
    """What the calls of a conversation so far are sent under."""

    def __init__(self, fits: re.Pattern[str]) -> None:
        self._fits = fits
        self._used: set[str] = set()
        self._tries = Counter[str]()
        """By id: how many it was replaced by; a conversation may have it at every step."""
        self._open: dict[str, list[str]] = {}
        """By id: what the newest calls with it are sent under, without those answered."""
        self._answer: set[str] = set()
        """Ids of the answer that is being read."""

    def of(self, message: Message) -> Message:
        """Return the next message as it is sent."""
        update: dict[str, Any] = {}
        self._answer.clear()
        if isinstance(given := message.content, list):
            blocks = [self._block(one) for one in given]
            if any(new is not old for new, old in zip(blocks, given, strict=True)):
                update["content"] = blocks
        if message.tool_calls:
            ids = [self._call(one.id) for one in message.tool_calls]
            if any(new != old.id for new, old in zip(ids, message.tool_calls, strict=True)):
                update["tool_calls"] = tuple(
                    one.model_copy(update={"id": name})
                    for one, name in zip(message.tool_calls, ids, strict=True)
                )
        answered = message.tool_call_id
        if answered is not None and (name := self._result(answered)) != answered:
            update["tool_call_id"] = name
        return message.model_copy(update=update) if update else message

    def _block(self, block: Block) -> Block:
        for kind, sent in ((CALL, self._call), (RESULT, self._result)):
            inner = block.get(kind)
            if isinstance(inner, dict) and isinstance(given := inner.get(_ID), str):
                name = sent(given)
                return block if name == given else {**block, kind: {**inner, _ID: name}}
        return block

    def _call(self, given: str) -> str:
        name = given
        while name in self._used or not self._fits.fullmatch(name):
            tries = self._tries[given]
            name, self._tries[given] = own_id(given, tries), tries + 1
        self._used.add(name)
        if given not in self._answer:
            self._answer.add(given)
            self._open[given] = []
        self._open[given].append(name)
        return name

    def _result(self, given: str) -> str:
        names = self._open.get(given)
        if not names:  # of a call that is not in the conversation
            return given if self._fits.fullmatch(given) else own_id(given, 0)
        return names.pop(0) if len(names) > 1 else names[0]


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
