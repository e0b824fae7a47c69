"""Assembles server-sent events into the completion that the same request gets unstreamed. Pure."""

from collections.abc import Iterator
from typing import Any

import orjson

from stepfleet.orchestrator.tools.calls import MOST_CALLS
from stepfleet.worker.models.openai_answer import malformed

_DONE = b"[DONE]"


class EventLines:
    """Cuts a byte stream into the data of its server-sent events."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes and return the data of every event that they complete."""
        head, newline, rest = chunk.rpartition(b"\n")
        if not newline:
            self._begun.append(chunk)
            return []
        lines = b"".join([*self._begun, head]).split(b"\n")
        self._begun = [rest]
        return [data for line in lines for data in self._line(line.rstrip(b"\r"))]

    def end(self) -> list[bytes]:
        """Return the data of an event that the stream's end completes."""
        return self.feed(b"\n\n")

    def _line(self, line: bytes) -> Iterator[bytes]:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            yield b"\n".join(self._data)
            self._data.clear()


class StreamedCompletion:
    """The completion so far. `error` is the payload of a failure that came as an event."""

    def __init__(self) -> None:
        self.error: dict[str, Any] | None = None
        self._done = False
        self._head: dict[str, Any] = {}
        self._usage: Any = None
        self._content: list[str] = []
        self._refusal: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._newest = -1
        self._finish_reason: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing of interest follows."""
        return self._done or self.error is not None

    def add(self, data: bytes) -> str:
        """Take one event and return the piece of text in it. Raises `ModelError` if malformed."""
        if data == _DONE:
            self._done = True
            return ""
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise malformed("an event of the stream is not JSON") from None
        if not isinstance(event, dict):
            raise malformed("an event of the stream is not a JSON object")
        if event.get("error"):
            self.error = event
            return ""
        self._head = self._head or {key: event.get(key) for key in ("id", "model", "created")}
        self._usage = event.get("usage") or self._usage
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
        if self._calls:
            message["tool_calls"] = [call for _, call in sorted(self._calls.items())]
        choice = {"index": 0, "message": message, "finish_reason": self._finish_reason}
        started = bool(self._content or self._calls or self._refusal or self._finish_reason)
        return {**self._head, "choices": [choice] if started else [], "usage": self._usage}

    def _add_choice(self, choice: dict[str, Any]) -> str:
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return ""
        for call in delta.get("tool_calls") or ():
            self._add_call(call)
        if isinstance(refused := delta.get("refusal"), str):
            self._refusal.append(refused)
        piece = delta.get("content")
        if not isinstance(piece, str):
            return ""
        self._content.append(piece)
        return piece

    def _add_call(self, delta: Any) -> None:
        """Join a piece of a call to the call that it continues."""
        if not isinstance(delta, dict):
            raise malformed("a tool call of the stream is not an object")
        function = delta.get("function")
        function = function if isinstance(function, dict) else {}
        index = self._index(delta)
        if index not in self._calls and len(self._calls) > MOST_CALLS:
            return  # one call too many is known: the others are told by it
        self._newest = max(self._newest, index)
        call = self._calls.setdefault(
            index, {"type": "function", "function": {"name": "", "arguments": ""}}
        )
        if delta.get("id"):
            call["id"] = delta["id"]
        for part in ("name", "arguments"):
            if isinstance(piece := function.get(part), str):
                call["function"][part] += piece

    def _index(self, delta: dict[str, Any]) -> int:
        index = delta.get("index")
        if isinstance(index, int):
            return index
        # Servers that leave the index out send each call whole, or continue the newest one.
        newest = self._newest
        known = self._calls.get(newest, {}).get("id")
        starts = newest < 0 or (delta.get("id") and delta["id"] != known)
        return newest + 1 if starts else newest
