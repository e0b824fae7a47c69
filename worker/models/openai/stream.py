"""Assembles server-sent events into the completion that the same request gets unstreamed. Pure."""

from collections.abc import Iterator
from typing import Any

import orjson

from stepfleet.worker.models.lenient_json import read_json
from stepfleet.worker.models.openai.answer import malformed
from stepfleet.worker.models.openai.deltas import StreamedCalls, as_list

_DONE = b"[DONE]"
_FIELDS = (b":", b"event:", b"id:", b"retry:")


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
        elif line and self._data and self._is_cut() and not line.startswith(_FIELDS):
            # A line break that the server did not escape: the text goes on.
            self._data.append(line)

    def _is_cut(self) -> bool:
        last = self._data[-1].rstrip()
        return self._data[0].startswith(b"{") and not last.endswith(b"}")


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
        try:
            event = read_json(data)
        except orjson.JSONDecodeError:
            raise malformed("an event of the stream is not JSON") from None
        if not isinstance(event, dict):
            raise malformed("an event of the stream is not a JSON object")
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
        for call in as_list(delta.get("tool_calls")):
            self._calls.add(call)
        if isinstance(refused := delta.get("refusal"), str):
            self._refusal.append(refused)
        piece = _text(delta.get("content"))
        self._text += len(piece)
        if piece:
            self._content.append(piece)
        return piece


def _text(content: Any) -> str:
    """Return the text of a delta; some servers send parts of it in a list, as in whole answers."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join(part for part in parts if isinstance(part, str))
