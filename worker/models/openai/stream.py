"""Assembles server-sent events into the completion that the same request gets unstreamed. Pure.

By the specification a call's first piece has index, id and name, and the others more of its
arguments. Servers omit the index or give all calls the same one, repeat the name or everything in
each piece, send arguments as an object, or send the name later than the id.
"""

from dataclasses import dataclass, field
from typing import Any

import orjson

from stepfleet.orchestrator.tools.calls import MOST_CALLS
from stepfleet.worker.models.bodies import malformed, parse_event
from stepfleet.worker.models.sent_back import THOUGHTS, add_extra

_DONE = b"[DONE]"
REASONING_FIELDS = ("reasoning_content", "reasoning")
REASONING_DETAILS = "reasoning_details"
_TEXTS = ("text", "summary", "data", "thinking")
_LONGEST_NAME = 1024
"""Characters of a name that are kept: more than a valid one has, so that it stays invalid."""


@dataclass(slots=True)
class _Call:
    """One call so far; its arguments stay in pieces, so that joining them costs once."""

    id: Any = None
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    size: int = 0
    is_whole: bool = False
    """Whether its arguments look like a whole object."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What its service must get back with it."""

    def add_name(self, piece: str) -> None:
        if piece.startswith(self.name):  # the first, the whole one again, or the name so far
            self.name = piece[:_LONGEST_NAME]
        elif len(self.name) < _LONGEST_NAME:
            self.name = (self.name + piece)[:_LONGEST_NAME]

    def add_arguments(self, piece: str) -> None:
        repeated = self.is_whole and len(piece) == self.size and piece == "".join(self.pieces)
        if piece and not repeated:
            self.pieces.append(piece)
            self.size += len(piece)
            # Computed once per piece: later pieces read it again, however long this one is.
            self.is_whole = piece.rstrip().endswith("}")

    def payload(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.pieces)}
        named = {} if self.id is None else {"id": self.id}
        return {"type": "function", "function": function, **named, **self.extra}


class StreamedCalls:
    """The calls of one completion so far, in the order of their indexes."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, int], _Call] = {}
        self._last: dict[int, int] = {}
        self._newest: tuple[int, int] | None = None
        self.size = 0
        """Characters of their arguments."""

    def __len__(self) -> int:
        return len(self._calls)

    def all(self) -> list[dict[str, Any]]:
        """Return the calls as an answer in one piece has them."""
        return [call.payload() for _, call in sorted(self._calls.items())]

    def add(self, delta: Any) -> None:
        """Join a piece to the call that it continues. Raises `ModelError` if it is no object."""
        if not isinstance(delta, dict):
            raise malformed("a tool call of the stream is not an object")
        function = delta.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments = function.get("name"), function.get("arguments")
        place = self._place(delta, starts=bool(name))
        if place not in self._calls and len(self._calls) > MOST_CALLS:
            return  # one call too many is known: an error answers the others
        self._newest = place
        call = self._calls.setdefault(place, _Call())
        self._last[place[0]] = place[1]
        before = call.size
        if delta.get("id"):
            call.id = delta["id"]
        if isinstance(name, str):
            call.add_name(name)
        if isinstance(arguments, dict):
            arguments = orjson.dumps(arguments).decode()
        if isinstance(arguments, str):
            call.add_arguments(arguments)
        self.size += call.size - before
        add_extra(call.extra, delta)

    def _place(self, delta: dict[str, Any], *, starts: bool) -> tuple[int, int]:
        """Return where the call of a piece stands: its index, and which of those that share it."""
        index = delta.get("index")
        if not isinstance(index, int) or isinstance(index, bool):
            return self._without_index(delta)
        place = (index, self._last.get(index, 0))
        known = self._calls.get(place)
        if known and starts and known.is_whole and self._is_other(delta, known):
            return (index, place[1] + 1)
        return place

    def _without_index(self, delta: dict[str, Any]) -> tuple[int, int]:
        # Such servers send each call whole, or continue the newest one.
        if self._newest is None:
            return (0, 0)
        index, nth = self._newest
        return (index + 1, 0) if self._is_other(delta, self._calls[index, nth]) else (index, nth)

    @staticmethod
    def _is_other(delta: dict[str, Any], known: _Call) -> bool:
        return bool(delta.get("id")) and delta["id"] != known.id


class StreamedDetails:
    """The items of reasoning so far: pieces of one type and index are one item."""

    def __init__(self) -> None:
        self._items: list[tuple[dict[str, Any], dict[str, list[str]]]] = []

    def add(self, piece: Any) -> None:
        """Join a piece to the last item, or begin another one."""
        if not isinstance(piece, dict):
            return
        place = (piece.get("type"), piece.get("index"))
        last = self._items[-1][0] if self._items else {}
        if not last or place != (last.get("type"), last.get("index")) or _is_whole(last):
            if len(self._items) > MOST_CALLS:
                return
            self._items.append(({}, {}))
        known, texts = self._items[-1]
        for name, value in piece.items():
            if name in _TEXTS and isinstance(value, str):
                texts.setdefault(name, []).append(value)
            elif value is not None or name not in known:
                known[name] = value

    def all(self) -> list[dict[str, Any]]:
        """Return the items as an answer in one piece has them."""
        return [
            {**known, **{name: "".join(pieces) for name, pieces in texts.items()}}
            for known, texts in self._items
        ]


class StreamedCompletion:
    """The completion so far. `error` is the payload of a failure that came as an event.

    `usage` is what the stream says of its tokens.
    """

    def __init__(self) -> None:
        self.error: dict[str, Any] | None = None
        self.usage: Any = None
        self._text = 0
        self._done = False
        self._head: dict[str, Any] = {}
        self._content: list[str] = []
        self._refusal: list[str] = []
        self._reasoning: dict[str, list[str]] = {}
        self._details = StreamedDetails()
        self._thoughts = StreamedDetails()
        self._extra: dict[str, Any] = {}
        self._calls = StreamedCalls()
        self._finish_reason: str | None = None

    @property
    def size(self) -> int:
        """How many characters of text and calls it has."""
        return self._text + self._calls.size

    @property
    def is_over(self) -> bool:
        """Whether nothing of interest follows."""
        return self._done or self.error is not None

    def add(self, data: bytes) -> str:
        """Take one event and return the piece of text in it. Raises `ModelError` if malformed."""
        if data == _DONE:
            self._done = True
            return ""
        event = parse_event(data)
        if event.get("error"):
            self.error = event
            return ""
        self._head = self._head or {key: event.get(key) for key in ("id", "model", "created")}
        self.usage = event.get("usage") or self.usage
        choices = event.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return ""
        return self._add_choice(choices[0])

    def payload(self) -> dict[str, Any]:
        """Return the whole completion. Raises `ModelError` when the stream broke off."""
        if self._finish_reason is None and not self._done:
            raise malformed("the stream broke off")
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content) or None}
        if self._refusal:
            message["refusal"] = "".join(self._refusal)
        message |= {field: "".join(pieces) for field, pieces in self._reasoning.items()}
        if details := self._details.all():
            message[REASONING_DETAILS] = details
        if thoughts := self._thoughts.all():
            message[THOUGHTS] = thoughts
        message |= self._extra
        if self._calls:
            message["tool_calls"] = self._calls.all()
        choice = {"index": 0, "message": message, "finish_reason": self._finish_reason}
        started = bool(self._content or self._calls or self._refusal or self._finish_reason)
        return {**self._head, "choices": [choice] if started else [], "usage": self.usage}

    def _add_choice(self, choice: dict[str, Any]) -> str:
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return ""
        for call in _as_list(delta.get("tool_calls")):
            self._calls.add(call)
        if isinstance(refused := delta.get("refusal"), str):
            self._refusal.append(refused)
        for name in REASONING_FIELDS:
            if isinstance(thought := delta.get(name), str) and thought:
                self._reasoning.setdefault(name, []).append(thought)
                self._text += len(thought)
        for one in _as_list(delta.get(REASONING_DETAILS)):
            self._details.add(one)
        for one in _as_list(delta.get(THOUGHTS)):
            self._thoughts.add(one)
        add_extra(self._extra, delta)
        piece = _text(delta.get("content"))
        self._text += len(piece)
        if piece:
            self._content.append(piece)
        return piece


def _is_whole(item: dict[str, Any]) -> bool:
    """Return whether an item without an index is over: pieces of the next one look like its own."""
    if item.get("index") is not None:
        return False
    return bool(item.get("signature")) or item.get("type") == "redacted_thinking"


def _as_list(value: Any) -> list[Any]:
    """Return a list as it is, one thing as a list of it, nothing as an empty one."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _text(content: Any) -> str:
    """Return the text of a delta; some servers send parts of it in a list, as in whole answers."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join(part for part in parts if isinstance(part, str))
