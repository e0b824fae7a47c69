"""Puts the items of a streamed response together from whatever its server tells of them. Pure.

By the specification each item is begun, told in pieces, ended part by part and then as a whole, and
stands once more in the last event. Servers leave out any of these.
"""

from dataclasses import dataclass, field
from typing import Any

from stepfleet.worker.models.bodies import MOST_BLOCKS, word

_PARTS = {
    "response.output_text": ("output_text", "text"),
    "response.refusal": ("refusal", "refusal"),
}
_ARGUMENTS = "response.function_call_arguments"
_MESSAGE, _CALL = "message", "function_call"
_ANSWERS = {_MESSAGE, _CALL}
COMMENTARY, FINAL = "commentary", "final_answer"
"""Phases of messages: what a model says on its way, and the answer itself."""


@dataclass(slots=True)
class _Item:
    """One item so far; `known` is what an event has said of it as an object."""

    place: int
    kind: str
    is_named: bool = False
    known: dict[str, Any] = field(default_factory=dict)
    is_whole: bool = False
    parts: dict[tuple[int, str], list[str]] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)

    def is_other(self, given: dict[str, Any]) -> bool:
        """Return whether an event's item is another call than this."""
        known, named = self.known.get("call_id"), given.get("call_id")
        return bool(known and named and known != named)

    def payload(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self.parts:
            fields = dict(_PARTS.values())
            told["content"] = [
                {"type": type_, fields[type_]: "".join(pieces)}
                for (_, type_), pieces in sorted(self.parts.items())
            ]
        if self.arguments:
            told["arguments"] = "".join(self.arguments)
        if self.is_whole:
            told = {name: value for name, value in told.items() if not self.known.get(name)}
        return {**self.known, "type": self.kind, **told}


class StreamedItems:
    """The items so far, in the order of their indexes. `size` is their text and calls."""

    def __init__(self) -> None:
        self.size = 0
        self._items: list[_Item] = []
        self._known: dict[tuple[str, int | str], _Item] = {}
        self._newest: dict[str, _Item] = {}

    @property
    def are_whole(self) -> bool:
        """Whether each item was told to be completed, an answer among them."""
        return any(one.kind in _ANSWERS for one in self._items) and all(
            one.is_whole and one.known.get("status", "completed") == "completed"
            for one in self._items
        )

    def add(self, kind: str, event: dict[str, Any]) -> str:
        """Take an event of the type `kind` and return the piece of text in it."""
        name, _, phase = kind.rpartition(".")
        if name in _PARTS and phase in ("delta", "done"):
            type_, said = _PARTS[name]
            text = word(event.get("delta" if phase == "delta" else said))
            return self._add_text(event, type_, text, is_piece=phase == "delta")
        if kind == "response.content_part.done" and isinstance(part := event.get("part"), dict):
            for type_, said in _PARTS.values():
                if part.get("type") == type_:
                    return self._add_text(event, type_, word(part.get(said)), is_piece=False)
        elif name == _ARGUMENTS and phase in ("delta", "done"):
            self._add_arguments(event, phase)
        elif name == "response.output_item" and phase in ("added", "done"):
            self._keep(event, is_whole=phase == "done")
        return ""

    def output(self, final: Any) -> Any:
        """Return the items of the answer; `final` are those of the stream's last event.

        Items that were told are missing from it on some servers: then it has no text and no call.
        """
        told = [one.payload() for one in sorted(self._items, key=lambda one: (one.place, one.kind))]
        if not final:
            return told
        if isinstance(final, list) and not any(_is_answer(one) for one in final):
            return [*final, *(one for one in told if _is_answer(one))]
        return final

    def _add_text(self, event: dict[str, Any], type_: str, text: str, *, is_piece: bool) -> str:
        item = self._at(event, _MESSAGE)
        if not text or item is None:
            return ""
        at = event.get("content_index")
        pieces = item.parts.setdefault((at if isinstance(at, int) else 0, type_), [])
        if not is_piece and pieces:  # all of them once more
            pieces[:] = [text]
            return ""
        pieces.append(text)
        self.size += len(text)
        is_aside = type_ != "output_text" or item.known.get("phase") == COMMENTARY
        return "" if is_aside else text

    def _add_arguments(self, event: dict[str, Any], phase: str) -> None:
        if (item := self._at(event, _CALL)) is None:
            return
        if phase == "delta":
            piece = word(event.get("delta"))
            item.arguments.append(piece)
            self.size += len(piece)
            return
        if text := word(event.get("arguments")):
            self.size += 0 if item.arguments else len(text)
            item.arguments = [text]
        if not item.known.get("name") and (name := word(event.get("name"))):
            item.known = {**item.known, "name": name}
        if not item.is_whole:
            item.known = {**item.known, "status": "completed"}

    def _keep(self, event: dict[str, Any], *, is_whole: bool) -> None:
        given = event.get("item")
        if not isinstance(given, dict):
            return
        item = self._at(event, word(given.get("type")), given, begins=not is_whole)
        if item is not None:
            item.known, item.is_whole = given, is_whole

    def _at(
        self,
        event: dict[str, Any],
        kind: str,
        given: dict[str, Any] | None = None,
        *,
        begins: bool = False,
    ) -> _Item | None:
        """Return the item that an event is about, None where there are too many.

        `given` is the event's own item; `begins` one that it begins.
        """
        index, given = event.get("output_index"), given or {}
        told = (event.get("item_id"), given.get("id"), given.get("call_id"))
        names = [one for one in map(word, told) if one]
        keys = [index] if isinstance(index, int) else names
        found = (self._known[kind, key] for key in keys if (kind, key) in self._known)
        item = next(found, None)
        if item is None and not isinstance(index, int) and not begins:
            item = self._open(kind, given, is_named=bool(names))
        if item is None or (item.is_whole and item.is_other(given)):
            if len(self._items) >= MOST_BLOCKS:
                return None
            last = max((one.place for one in self._items[-1:]), default=-1)
            item = _Item(index if isinstance(index, int) else last + 1, kind)
            self._items.append(item)
        item.is_named = item.is_named or bool(event.get("item_id") or given.get("id"))
        self._known |= {(kind, key): item for key in (*keys, *names)}
        self._newest[kind] = item
        return item

    def _open(self, kind: str, given: dict[str, Any], *, is_named: bool) -> _Item | None:
        """Return the newest item of a kind that has not ended: pieces without an index are its."""
        item = self._newest.get(kind)
        if item is None or item.is_whole or item.is_other(given) or (is_named and item.is_named):
            return None
        return item


def _is_answer(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") in _ANSWERS
