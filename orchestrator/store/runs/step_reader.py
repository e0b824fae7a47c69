"""Reads the log for claims; what a worker has read of a step it keeps, within a bound."""

from collections import OrderedDict
from typing import Any, NamedTuple

from stepfleet.orchestrator.memory.window import Messages
from stepfleet.orchestrator.records.calls.tools import LoggedCalls, ToolCall
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.steps import StepMessages, for_its_agent
from stepfleet.orchestrator.store.codec import Fields, reading, stored_steps
from stepfleet.orchestrator.store.compression import unpacked

KEPT_BYTES = 16 * 1024 * 1024
"""Memory for what a worker keeps of the steps that it has read, as `_weight` estimates it."""
_OBJECT_BYTES, _LIST_BYTES = 250, 60


class _Known(NamedTuple):
    plain: bytes
    step: StepMessages
    weight: int
    """What keeping it takes; 0 where it is not kept."""


class StepReader:
    """Reads what claims need of logged steps, and keeps it by run and by the text that is stored.

    A claim reads all steps of its run, most of them as the claim before did. The same text says the
    same, whoever wrote it: what is kept is never out of date. Each claim gets messages of its own,
    as users' code may change what lies in them. Runs take at most `most` bytes of memory; what was
    not read for longest goes first.
    """

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self._most, self.size = most, 0
        self.kept: OrderedDict[str, dict[str, _Known]] = OrderedDict()

    def said(
        self, run_id: str, fields: Fields, first: int = 0
    ) -> tuple[list[Messages], LoggedCalls]:
        """Return the messages of a run's steps from `first` on, and their calls to look up.

        Raises `SerializationError` when a record cannot be read.
        """
        known = self.forget(run_id)
        texts = stored_steps(fields, first)
        with reading:
            found = [known.get(text) or _read(text) for text in texts]
        self._keep(
            run_id, {text: one for text, one in zip(texts, found, strict=True) if one.weight}
        )
        said = for_its_agent([one.step for one in found])
        return [tuple(map(_own, one)) for one in said], LoggedCalls([one.plain for one in found])

    def forget(self, run_id: str) -> dict[str, _Known]:
        """Return what is kept of a run, by its text, and keep it no longer."""
        known = self.kept.pop(run_id, {})
        self.size -= sum([one.weight for one in known.values()])
        return known

    def _keep(self, run_id: str, known: dict[str, _Known]) -> None:
        if not known:
            return
        self.kept[run_id] = known
        self.size += sum([one.weight for one in known.values()])
        while self.size > self._most:
            self.forget(next(iter(self.kept)))


def _read(stored: str) -> _Known:
    """Read a step; one of plain messages has a weight, as later claims may have it as well."""
    plain = unpacked(stored)
    step = StepMessages.from_json(plain)
    return _Known(plain, step, _weight(plain) if all(map(_is_plain, step.messages)) else 0)


def _weight(plain: bytes) -> int:
    """Return about what a step takes in memory: its JSON twice, and its objects and lists."""
    objects, lists = plain.count(b"{"), plain.count(b"[")
    return 2 * len(plain) + _OBJECT_BYTES * objects + _LIST_BYTES * lists


def _is_plain(message: Message) -> bool:
    """Return whether nothing in a message can be changed but the arguments of its calls."""
    return isinstance(message.content, str) and not message.metadata


def _own(message: Message) -> Message:
    """Return a message that shares with a plain one what nobody can change."""
    fields = vars(message) | {"metadata": message.metadata.copy()}
    if calls := message.tool_calls:
        fields["tool_calls"] = tuple([_own_call(call) for call in calls])
    return Message.of_fields(fields)


def _own_call(call: ToolCall) -> ToolCall:
    return ToolCall.of_fields(vars(call) | {"arguments": _copied(call.arguments)})


def _copied(value: Any) -> Any:
    """Return a copy of JSON data."""
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value
