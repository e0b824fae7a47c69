"""Ids of calls as a service takes them: a pure function of the conversation.

A call keeps its id where it can; else it is sent under nine letters and digits, which all services
take. Under which depends on what came before the call alone: a request that goes on with a
conversation begins as the one before did, as prompt caches need.
"""

import re
from collections import Counter
from typing import Any

from stepfleet.orchestrator.records.conversation.blocks import CALL, RESULT
from stepfleet.orchestrator.records.conversation.messages import Block, Message
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
