"""Replies of a scripted model. Records only; must not know HTTP or how a reply is chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any

JSON = "application/json"
EVENTS = "text/event-stream"
REPLIED = "replied"
REFUSED = "refused"


@dataclass(frozen=True)
class Usage:
    """Token counts of one call."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    cache_write_tokens: int = 0


class Ending(StrEnum):
    """The end of the connection after the last byte."""

    COMPLETE = "complete"
    CLOSE = "close"
    """The connection closes although more was announced."""
    RESET = "reset"
    """The connection is reset: before any byte where there are none."""
    SILENCE = "silence"
    """Nothing, until the client goes away."""


@dataclass(frozen=True)
class Answer:
    """One answer: a body in pieces. `length` (bytes) is announced; None means chunked.

    `delay` and `pause` are the seconds before the first piece and between the pieces; a delay of
    None leaves it to the server.
    """

    outcome: str
    status: int = HTTPStatus.OK
    pieces: tuple[bytes, ...] = ()
    content_type: str = JSON
    length: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    ending: Ending = Ending.COMPLETE
    delay: float | None = None
    pause: float = 0.0
    usage: Usage | None = None


class Quirk(StrEnum):
    """How the form of an answer departs from OpenAI's own."""

    REPEATED_NAMES = "repeated_names"
    """Each piece of a streamed call has its id and whole name again."""
    NO_INDEX = "no_index"
    """Pieces of streamed calls have no index."""
    SHARED_INDEX = "shared_index"
    """All streamed calls have the index 0."""
    ARGUMENTS_OBJECT = "arguments_object"
    """Arguments are an object instead of text, and come in one piece."""
    NO_FINISH_REASON = "no_finish_reason"
    """There is no finish reason."""
    CONTENT_PARTS = "content_parts"
    """Text comes as a list of parts."""
    RAW_CONTROL = "raw_control"
    """Line breaks and tabs in texts are not escaped."""
    NULLS = "nulls"
    """Absent fields of a piece are present as null."""
    NO_ROLE = "no_role"
    """No piece names a role."""
    COMMENTS = "comments"
    """Comments keep the stream alive between its events."""
    CRLF = "crlf"
    """The stream's lines end with CR LF."""
    NO_SPACE = "no_space"
    """There is no space after `data:`."""


@dataclass(frozen=True)
class ToolCallReply:
    """One tool call of the model.

    `arguments` is a mapping, or text that is sent as it is (to send malformed JSON). `id` is
    made from conversation, turn and index where it is None; "" is sent as a blank id. With
    `omit_id` the field is missing.
    """

    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)
    id: str | None = None
    omit_id: bool = False


@dataclass(frozen=True)
class Reply:
    """One sound answer of the model, or one that is odd in a way that models are.

    `finish_reason` follows from the tool calls where it is None; `usage` is estimated, alike
    for equal requests, where it is None, and left out with `send_usage=False`. `latency` (seconds
    before the answer) replaces the server's; `pause` is the seconds between the events of a
    stream, and `piece` the characters of content and arguments in each. `extra` adds fields to
    the message. `reasoning` is sent signed where the protocol has it. `refusal` is why the model
    refuses, in the form of the protocol. `service_tier` is the tier that the answer names, in the
    provider's words. `quirks` are departures from OpenAI's own form.
    """

    content: str | None = None
    tool_calls: tuple[ToolCallReply, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    send_usage: bool = True
    model: str | None = None
    latency: float | None = None
    pause: float = 0.0
    piece: int = 24
    extra: Mapping[str, Any] = field(default_factory=dict)
    reasoning: str | None = None
    refusal: str | None = None
    service_tier: str | None = None
    quirks: tuple[Quirk, ...] = ()

    def __post_init__(self) -> None:
        """Take any sequence of calls and names of quirks.

        Raises `ValueError` for pieces without a character, and for a quirk that there is not.
        """
        object.__setattr__(self, "tool_calls", tuple(self.tool_calls))
        object.__setattr__(self, "quirks", tuple(Quirk(one) for one in self.quirks))
        if self.piece < 1:
            raise ValueError(f"Reply.piece is {self.piece}; a piece has at least 1 character")

    @property
    def ends_with(self) -> str:
        """The finish reason that is sent."""
        return self.finish_reason or ("tool_calls" if self.tool_calls else "stop")
