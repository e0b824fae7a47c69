"""Assembles server-sent events into the completion that the same request gets unstreamed. Pure.

By the specification a call's first piece has index, id and name, and the others more of its
arguments. Servers omit the index or give all calls the same one, repeat the name or everything in
each piece, send arguments as an object, or send the name later than the id.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from stepfleet.orchestrator.models.failures import stated_failure
from stepfleet.orchestrator.tools.calls import MOST_CALLS
from stepfleet.worker.models.bodies import (
    DONE,
    json_text,
    malformed,
    merged_usage,
    parse_event,
    word,
)
from stepfleet.worker.models.sent_back import REASONING_FIELDS, THOUGHTS, add_extra

CUT = frozenset({"length", "max_tokens", "model_length", "max_output_tokens"})
"""Finish reasons of answers that were cut at their limit of tokens."""
_BEGIN, _END = "<think>", "</think>"
_MOST_BLANKS = 64
_THOUGHT = re.compile(rf"\s{{0,{_MOST_BLANKS}}}{_BEGIN}(.*?)(?:{_END}\s*|\Z)", re.DOTALL)
_WITHOUT_TAGS = ("openai", "azure")
"""Services whose own models write no such tags: there they are text that somebody asked for."""


def has_tags(service: str) -> bool:
    """Return whether texts of a service may begin with a thought."""
    return service not in _WITHOUT_TAGS


def leading_thought(text: str, *, is_open: bool) -> re.Match[str] | None:
    """Return the thought that a text begins with, without its tags the match's only group.

    `is_open`: it may lack its end, as where the answer was cut or calls follow.
    """
    found = _THOUGHT.match(text)
    return found if found and (is_open or found[0].rstrip().endswith(_END)) else None


class LeadingThought:
    """Passes the pieces of a text on, without the thought that it begins with."""

    def __init__(self) -> None:
        self.is_open = True
        """Whether all so far is of a thought, or may be."""
        self._is_thought = False
        self._has_text = False
        self._held = ""
        """What may be a part of a tag."""

    def add(self, piece: str) -> str:
        """Add a piece and return what is to be told."""
        if self._has_text:
            return piece
        held = self._held + piece
        if not self._is_thought:
            begin = held.lstrip()
            if _BEGIN.startswith(begin[: len(_BEGIN)]) and len(held) - len(begin) <= _MOST_BLANKS:
                self._is_thought = len(begin) >= len(_BEGIN)
            else:
                self.is_open, self._has_text = False, True
                return held
            if not self._is_thought:
                self._held = held
                return ""
        return self._after(held) if self.is_open else self._text(held)

    def _after(self, held: str) -> str:
        """Return the text after the end of the thought, once that has come."""
        _, end, text = held.partition(_END)
        self.is_open = not end
        self._held = "" if end else held[1 - len(_END) :]
        return self._text(text)

    def _text(self, piece: str) -> str:
        text = piece.lstrip()
        self._has_text = bool(text)
        return text


REASONING_DETAILS = "reasoning_details"
MOST_CHOICES = 16
"""So many choices of one completion are read."""
_IMAGES = {"image_url", "image", "output_image"}
_TEXTS = ("text", "summary", "data", "thinking")
_LONGEST_NAME = 1024
"""Characters of a name that are kept: more than a valid one has, so that it stays invalid."""


@dataclass(slots=True)
class _Call:
    """One call so far; its arguments stay in pieces, so that joining them costs once."""

    id: str | int | None = None
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    given: dict[str, Any] | None = None
    """Its arguments, where the server sends them as an object."""
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
        if piece and not self._has(piece):
            self.pieces.append(piece)
            self.size += len(piece)
            # Computed once per piece: later pieces read it again, however long this one is.
            self.is_whole = piece.rstrip().endswith("}")

    def is_followed_by(self, call_id: Any, name: Any, arguments: Any) -> bool:
        """Return whether a piece begins another call: another id, or an object after this one's."""
        if call_id is not None and call_id != self.id:
            return True
        if not name or not self.is_whole:
            return False
        if isinstance(arguments, dict):
            return True
        begins = isinstance(arguments, str) and arguments.lstrip().startswith("{")
        return begins and not self._has(arguments)

    def payload(self) -> dict[str, Any]:
        arguments = "".join(self.pieces) if self.given is None else self.given
        named = {} if self.id is None else {"id": self.id}
        return {
            "type": "function",
            "function": {"name": self.name, "arguments": arguments},
            **named,
            **self.extra,
        }

    def _has(self, piece: str) -> bool:
        """Return whether a piece repeats all arguments so far."""
        return self.is_whole and len(piece) == self.size and piece == "".join(self.pieces)


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
        """Join a piece to the call that it continues. Raises `ModelError` if not an object."""
        if not isinstance(delta, dict):
            raise malformed("a tool call of the stream is not an object")
        function = delta.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments = function.get("name"), function.get("arguments")
        call_id = delta.get("id") or None
        call_id = call_id if isinstance(call_id, str | int) else None
        place = self._place(delta.get("index"), call_id, name, arguments)
        if place not in self._calls and len(self._calls) > MOST_CALLS:
            return  # one call too many is known: an error answers the others
        self._newest = place
        call = self._calls.setdefault(place, _Call())
        self._last[place[0]] = place[1]
        before = call.size
        if call_id is not None:
            call.id = call_id
        if isinstance(name, str):
            call.add_name(name)
        if isinstance(arguments, dict):
            call.given, call.is_whole = arguments, True
        elif isinstance(arguments, str):
            call.add_arguments(arguments)
        self.size += call.size - before
        add_extra(call.extra, delta)

    def _place(self, index: Any, call_id: Any, name: Any, arguments: Any) -> tuple[int, int]:
        """Return where the call of a piece stands: its index, and which of those that share it."""
        if not isinstance(index, int) or isinstance(index, bool):
            return self._without_index(call_id, name, arguments)
        place = (index, self._last.get(index, 0))
        known = self._calls.get(place)
        if known and known.is_whole and name and known.is_followed_by(call_id, name, arguments):
            return (index, place[1] + 1)
        return place

    def _without_index(self, call_id: Any, name: Any, arguments: Any) -> tuple[int, int]:
        # Such servers send each call whole, or continue the newest one.
        if self._newest is None:
            return (0, 0)
        index, nth = self._newest
        known = self._calls[index, nth]
        return (index + 1, 0) if known.is_followed_by(call_id, name, arguments) else (index, nth)


class StreamedDetails:
    """The items of reasoning so far: pieces of one type and index are one item."""

    def __init__(self) -> None:
        self._items: list[tuple[dict[str, Any], dict[str, list[str]]]] = []
        self._place: tuple[str, int] | None = None

    def add(self, piece: Any) -> None:
        """Join a piece to the last item, or begin another one."""
        if not isinstance(piece, dict):
            return
        kind, index = piece.get("type"), piece.get("index")
        place = (kind if isinstance(kind, str) else "", index if isinstance(index, int) else 0)
        if place != self._place or _is_whole(self._items[-1][0]):
            if len(self._items) > MOST_CALLS:
                return
            self._place = place
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


class _StreamedChoice:
    """One choice so far."""

    def __init__(self, *, has_tags: bool) -> None:
        self._leading = LeadingThought() if has_tags else None
        self.size = 0
        """Characters of its text and reasoning."""
        self.finish_reason: Any = None
        self.calls = StreamedCalls()
        self._content: list[str] = []
        self._refusal: list[str] = []
        self._reasoning: dict[str, list[str]] = {}
        self._details = StreamedDetails()
        self._thoughts = StreamedDetails()
        self._extra: dict[str, Any] = {}
        self._has_deltas = False
        self._images: list[Any] = []
        self._transcript: list[str] = []

    @property
    def has_begun(self) -> bool:
        told = self._content or self._refusal or self._images or self._transcript
        return bool(told or self.calls or self.finish_reason)

    def add(self, choice: dict[str, Any]) -> str:
        """Add a piece and return the text in it."""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = choice.get("delta")
        if isinstance(delta, dict) and delta:
            self._has_deltas = True
        else:
            delta = self._named_message(choice)
        if "tool_calls" in delta or "function_call" in delta:
            self._add_calls(delta)
        if isinstance(refused := delta.get("refusal"), str):
            self._refusal.append(refused)
        self._add_reasoning(delta)
        self._add_media(delta)
        add_extra(self._extra, delta)
        content = delta.get("content")
        if not isinstance(content, str):
            for thought in thoughts_in(content):
                self._think(REASONING_FIELDS[0], thought)
            content = text_in(content)
        if content:
            self.size += len(content)
            self._content.append(content)
        return self._told(content)

    def _told(self, content: str) -> str:
        """Return what is told of a piece: nothing of a thought that the text begins with."""
        if self._leading is None:
            return content
        told = self._leading.add(content)
        if self.finish_reason and self._leading.is_open:
            is_open = bool(self.calls) or word(self.finish_reason).lower() in CUT
            is_thought = leading_thought(text := "".join(self._content), is_open=is_open)
            self._leading = None
            return "" if is_thought else text
        return told

    def _add_reasoning(self, delta: dict[str, Any]) -> None:
        for name in REASONING_FIELDS:
            if isinstance(thought := delta.get(name), str):  # its server may want back an empty one
                self._think(name, thought)
        for one in _as_list(delta.get(REASONING_DETAILS)):
            self._details.add(one)
        for one in _as_list(delta.get(THOUGHTS)):
            self._thoughts.add(one)

    def _add_media(self, delta: dict[str, Any]) -> None:
        self._images = self._images or images_in(delta)[:1]  # that there is one is all that is told
        if transcript := transcript_of(delta):
            self._transcript.append(transcript)

    def _think(self, name: str, thought: str) -> None:
        self._reasoning.setdefault(name, []).append(thought)
        self.size += len(thought)

    def payload(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content) or None}
        if self._refusal:
            message["refusal"] = "".join(self._refusal)
        if self._images:
            message["images"] = self._images
        if self._transcript:
            message["audio"] = {"transcript": "".join(self._transcript)}
        message |= {field: "".join(pieces) for field, pieces in self._reasoning.items()}
        if details := self._details.all():
            message[REASONING_DETAILS] = details
        if thoughts := self._thoughts.all():
            message[THOUGHTS] = thoughts
        message |= self._extra
        if self.calls:
            message["tool_calls"] = self.calls.all()
        return {"index": index, "message": message, "finish_reason": self.finish_reason}

    def _add_calls(self, delta: dict[str, Any]) -> None:
        called = delta.get("tool_calls")
        for call in _as_list(called):
            self.calls.add(call)
        if not called and (older := older_call(delta)):
            self.calls.add({"index": 0, "function": older})

    def _named_message(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a delta that its server names like a whole answer's message."""
        # After deltas it would be all of them once more.
        message = None if self._has_deltas else choice.get("message")
        if isinstance(message, dict):
            return message
        return {} if self._has_deltas else text_message(choice)


class StreamedCompletion:
    """The completion so far. `error` is the payload of a failure that came as an event.

    `usage` is what the stream says of its tokens. `service` is the name of the one it comes from.
    """

    def __init__(self, service: str = "") -> None:
        self._has_tags = has_tags(service)
        self.error: dict[str, Any] | None = None
        self.usage: Any = None
        self._tier: Any = None
        self._done = False
        self._said: dict[str, Any] | None = None
        self._head: dict[str, Any] = {}
        self._choices: dict[int, _StreamedChoice] = {}
        self._first: _StreamedChoice | None = None
        """The one whose text is told."""

    @property
    def size(self) -> int:
        """How many characters of text and calls it has."""
        return sum(one.size + one.calls.size for one in self._choices.values())

    @property
    def is_over(self) -> bool:
        """Whether nothing of interest follows."""
        return self._done or self.error is not None

    @property
    def finished(self) -> bool:
        """Whether its own finish reason has come: then it is whole, whatever else may follow."""
        return any(one.finish_reason for one in self._choices.values())

    def add(self, data: bytes) -> str:
        """Take one event and return the piece of text in it. Raises `ModelError` if malformed."""
        if data == DONE:
            self._done = True
            return ""
        event = parse_event(data)
        if given := event.get("usage"):
            self.usage = merged_usage(self.usage, given)
        if isinstance(groq := event.get("x_groq"), dict):
            self.usage = merged_usage(self.usage, groq.get("usage"))
            event = {"error": groq["error"]} if groq.get("error") else event
        self._tier = event.get("service_tier") or self._tier
        choices = event.get("choices")
        if event.get("error") or not choices or not isinstance(choices, list):
            # Words without an error may be news of the server: they explain a stream without end.
            self._said = stated_failure(event, "choices") or self._said
            self.error = event if event.get("error") else None
            return ""
        self._head = self._head or {key: event.get(key) for key in ("id", "model", "created")}
        text = ""
        for choice in choices:
            if not isinstance(choice, dict):
                continue
            if choice.get("error"):
                self.error = {"error": choice["error"]}
                break
            if given := choice.get("usage"):  # Moonshot's
                self.usage = merged_usage(self.usage, given)
            index = choice.get("index")
            place = index if isinstance(index, int) else 0
            known = self._choices.get(place) or self._begun(place)
            if known is not None:
                piece = known.add(choice)
                text += piece if known is self._first else ""
        return text

    def _begun(self, index: int) -> _StreamedChoice | None:
        """Return a new choice, None where there are too many."""
        if len(self._choices) >= MOST_CHOICES:
            return None
        known = self._choices[index] = _StreamedChoice(has_tags=self._has_tags)
        self._first = self._first or known
        return known

    def payload(self) -> dict[str, Any]:
        """Return the whole completion. Raises `ModelError` when the stream broke off."""
        choices = sorted(self._choices.items())
        if self._said and not self.finished:
            return self._said
        if not self.finished and not self._done:
            raise malformed("the stream broke off")
        begun = [one.payload(index) for index, one in choices if one.has_begun]
        ended = {"usage": self.usage, "service_tier": self._tier}
        return {**self._head, "choices": begun, **ended}


def choices_of(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of a completion."""
    choices = payload.get("choices")
    if not isinstance(choices, list):
        return []
    return [one for one in choices[:MOST_CHOICES] if isinstance(one, dict)]


def failure_in(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Return the failure that a completion states in place of an answer."""
    if stated := stated_failure(payload, "choices"):
        return stated
    for choice in choices_of(payload):
        if choice.get("error"):
            return {"error": choice["error"]}
    return None


def older_call(message: dict[str, Any]) -> dict[str, Any] | None:
    """Return the `function_call` of a message: the form of calls before there could be several."""
    called = message.get("function_call")
    is_one = isinstance(called, dict) and (called.get("name") or called.get("arguments"))
    return called if is_one else None


def thoughts_in(content: Any) -> list[str]:
    """Return the texts of the parts in which a model reasoned: Mistral's stand in the content."""
    if not isinstance(content, list):
        return []
    parts = [one for one in content if isinstance(one, dict) and one.get("type") == "thinking"]
    return [_text_or_none(one.get("thinking")) or "" for one in parts]


def images_in(message: dict[str, Any]) -> list[Any]:
    """Return the images of a message, wherever its server puts them."""
    content, images = message.get("content"), message.get("images")
    found = images if isinstance(images, list) else []
    if isinstance(content, list):
        parts = (one for one in content if isinstance(one, dict))
        found = [*found, *(one for one in parts if word(one.get("type")) in _IMAGES)]
    return found


def transcript_of(message: dict[str, Any]) -> str:
    """Return the words of an answer that was spoken."""
    audio = message.get("audio")
    return word(audio.get("transcript")) if isinstance(audio, dict) else ""


def text_message(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the message of a choice in the form of completions before chat: its `text`."""
    return {"content": text} if isinstance(text := choice.get("text"), str) else {}


def object_text(content: dict[str, Any]) -> str:
    """Return the text of a content that is one object: a part with text, or the answer's JSON."""
    if "text" in content or "type" in content or not content:
        return word(content.get("text"))
    return json_text(content)


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


def text_in(content: Any) -> str:
    """Return the text of a content or of a piece of it. Raises `ModelError` where it is none."""
    text = _text_or_none(content)
    if text is None:
        raise malformed("the message's content is not text")
    return text


def _text_or_none(content: Any) -> str | None:
    """Return the text of a content; some servers send parts of it in a list, or plain texts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        return object_text(content)
    if not isinstance(content, list):
        return None
    parts = [one.get("text") if isinstance(one, dict) else one for one in content]
    given = [one for one in parts if one is not None]
    return "".join(given) if all(isinstance(one, str) for one in given) else None
