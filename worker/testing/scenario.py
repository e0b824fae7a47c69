"""Replies, faults and latencies as values, whichever protocol carries them. Pure.

A fault is planned by its place in a conversation, or by a seeded rate.
"""

import hashlib
import math
from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from http import HTTPStatus
from itertools import accumulate
from statistics import NormalDist
from typing import Any, Self

_BYTES = 8


def draw(*parts: object) -> float:
    """Return a number from 0 up to 1, always the same for equal `parts`."""
    text = "\0".join(map(str, parts)).encode(errors="surrogatepass")
    digest = hashlib.blake2b(text, digest_size=_BYTES).digest()
    return int.from_bytes(digest) / (1 << 8 * _BYTES)


def name_of(*parts: object) -> str:
    """Return 24 hexadecimal digits, always the same for equal `parts`."""
    text = "\0".join(map(str, parts)).encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=12).hexdigest()


_FORMS = "write 0.05 for always, 0.2-1.5 for evenly between, or 1.0~0.5 for log-normal"


@dataclass(frozen=True)
class Latency:
    """Seconds before an answer: between `low` and `high`, or log-normal about `low`.

    Without `high` and `sigma` every answer takes `low` seconds. With `sigma`, half of the
    answers take longer than `low`, with the long tail of real services, up to `high` where it
    is given.
    """

    low: float = 0.0
    high: float | None = None
    sigma: float = 0.0

    def __post_init__(self) -> None:
        """Raise `ValueError` unless all are durations."""
        bounds = (self.low, self.low if self.high is None else self.high, self.sigma)
        if not all(math.isfinite(one) and one >= 0 for one in bounds) or bounds[1] < bounds[0]:
            raise ValueError(f"{self} is not a latency: use seconds >= 0 and low <= high")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `0.05`, `0.2-1.5` or `1.0~0.5` (median~sigma). Raises `ValueError`."""
        try:
            if "~" in text:
                median, sigma = text.split("~")
                return cls(float(median), sigma=float(sigma))
            if "-" in text:
                low, high = text.split("-")
                return cls(float(low), float(high))
            return cls(float(text))
        except ValueError as error:
            raise ValueError(f"{text!r} is not a latency ({error}); {_FORMS}") from None

    def seconds(self, *request: object) -> float:
        """Return the seconds that the request with these identifying parts waits."""
        if self.sigma:
            normal = NormalDist().inv_cdf(max(1e-9, draw("latency", *request)))
            seconds = self.low * math.exp(self.sigma * normal)
            return seconds if self.high is None else min(seconds, self.high)
        if self.high is None:
            return self.low
        return self.low + (self.high - self.low) * draw("latency", *request)


_NAMES = {
    str: "a string", bool: "a boolean", int: "an integer", float: "a number", dict: "an object",
    list: "an array",
}  # fmt: skip


@dataclass(frozen=True)
class Tagged:
    """An object whose field `type` says which fields it has; `usual` is the one without it."""

    kinds: Mapping[str, dict[str, Any]]
    usual: str | None = None


Misfit = tuple[str, str]


def misfit(value: Any, shape: Any, place: str = "", index: str = "[{}]") -> Misfit | None:
    """Return place and reason of the first value that does not fit, or None.

    `index` is the form of a list's index in a place.
    """
    if isinstance(shape, tuple):
        found = [misfit(value, one, place, index) for one in shape]
        inner = (one for one in found if one and one[0] != place)
        return None if None in found else next(inner, found[0])
    if isinstance(shape, frozenset):
        fits = isinstance(value, str) and value in shape
        return None if fits else (place, f"must be one of {', '.join(sorted(shape))}")
    if isinstance(shape, list):
        return _misfit_in_list(value, shape[0], place, index)
    if isinstance(shape, Tagged):
        return _misfit_of_kind(value, shape, place, index)
    if isinstance(shape, dict):
        return _misfit_in_object(value, shape, place, index)
    is_number = isinstance(value, bool) and shape in (int, float)
    fits = isinstance(value, int | float if shape is float else shape) and not is_number
    return None if fits else (place, f"must be {_NAMES.get(shape, shape)}")


def _misfit_in_list(value: Any, shape: Any, place: str, index: str) -> Misfit | None:
    if not isinstance(value, list):
        return place, "must be an array"
    found = (misfit(one, shape, place + index.format(i), index) for i, one in enumerate(value))
    return next((one for one in found if one), None)


def _misfit_in_object(
    value: Any, fields: Mapping[str, Any], place: str, index: str
) -> Misfit | None:
    if not isinstance(value, dict):
        return place, "must be an object"
    for key, shape in fields.items():
        name = key.removesuffix("?")
        inner = f"{place}.{name}" if place else name
        if value.get(name) is None:
            if name == key:
                return inner, "Field required"
        elif found := misfit(value[name], shape, inner, index):
            return found
    return None


def _misfit_of_kind(value: Any, shape: Tagged, place: str, index: str) -> Misfit | None:
    kind = value.get("type", shape.usual) if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in shape.kinds:
        known = ", ".join(map(repr, shape.kinds))
        return f"{place}.type", f"Invalid value: {str(kind)[:80]!r}. Supported values are: {known}"
    return _misfit_in_object(value, shape.kinds[kind], place, index)


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
class HttpAnswer:
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


LIFE = 300.0
"""Seconds for which an entry lives after it was last read or written."""
LEAST = 1024
"""Tokens of the shortest beginning that is cached."""
LOOKED_BACK = 20
"""Blocks before a mark, in which an entry is looked for."""
_STEP = 128
_BYTES_PER_TOKEN = 4
_MOST_ENTRIES = 200_000

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as a cache sees it; `paid` says whether usage counts what is written."""

    tokens: int
    readable: tuple[Place, ...] = ()
    kept: tuple[Place, ...] = ()
    paid: bool = False


def automatic(model: str, text: bytes) -> Prompt:
    """Return a prompt whose beginnings of 1,024 tokens, and each 128 more, are kept unasked."""
    tokens = len(text) // _BYTES_PER_TOKEN
    places = tuple(_steps(model, text, tokens)) if tokens >= LEAST else ()
    return Prompt(tokens, places, places)


def _steps(model: str, text: bytes, tokens: int) -> Iterator[Place]:
    digest, begin = hash(model), 0
    for size in range(LEAST, tokens + 1, _STEP):
        end = size * _BYTES_PER_TOKEN
        digest, begin = hash((digest, text[begin:end])), end
        yield digest, size


def marked(model: str, blocks: Sequence[tuple[bytes, bool]]) -> Prompt:
    """Return a prompt of which the beginnings that end at marked blocks are kept.

    A mark finds an entry that ends at most 20 blocks before it.
    """
    ends: list[Place] = [(hash(model), 0)]
    for data, _ in blocks:
        digest, size = ends[-1]
        ends.append((hash((digest, data)), size + len(data)))
    counted = [(digest, size // _BYTES_PER_TOKEN) for digest, size in ends]
    marks = [place for place, (_, is_marked) in enumerate(blocks, 1) if is_marked]
    near = {place for mark in marks for place in range(max(mark - LOOKED_BACK, 1), mark + 1)}
    return Prompt(
        counted[-1][1],
        tuple(counted[place] for place in near),
        tuple(counted[mark] for mark in marks if counted[mark][1] >= LEAST),
        paid=True,
    )


@dataclass
class PromptCache:
    """The beginnings that one service keeps, each until 5 minutes after its last use."""

    _entries: OrderedDict[int, float] = field(default_factory=OrderedDict)

    def usage(self, prompt: Prompt, usage: Usage, now: float) -> Usage:
        """Return the usage with the tokens that are read and written; `now` is in seconds."""
        known = self._entries
        read = max((size for end, size in prompt.readable if known.get(end, 0) > now), default=0)
        longest = max((size for _, size in prompt.kept), default=0) if prompt.paid else 0
        return replace(usage, cached_tokens=read, cache_write_tokens=max(longest - read, 0))

    def keep(self, prompt: Prompt, now: float) -> None:
        """Keep the prompt's beginnings, and those that it has read, from now on."""
        entries = self._entries
        read = [end for end, _ in prompt.readable if entries.get(end, 0) > now]
        for end in (*read, *(end for end, _ in prompt.kept)):
            entries[end] = now + LIFE
            entries.move_to_end(end)
        while entries and (len(entries) > _MOST_ENTRIES or next(iter(entries.values())) <= now):
            entries.popitem(last=False)


class FaultKind(StrEnum):
    """The ways in which a model service fails."""

    RATE_LIMITED = "rate_limited"
    """429, with the hints of the provider; `retry_after` is in them where the fault has one."""
    SERVER_ERROR = "server_error"
    """500."""
    OVERLOADED = "overloaded"
    """503; 529 of Anthropic."""
    HANG = "hang"
    """No answer until the client goes away."""
    RESET = "reset"
    """The connection is reset before the answer's first byte."""
    RESET_MID_BODY = "reset_mid_body"
    """The connection is reset in the middle of the body."""
    TRUNCATED_STREAM = "truncated_stream"
    """A stream ends in the middle without an error; a whole body breaks off."""
    ERROR_EVENT = "error_event"
    """A stream ends with an error event in its middle; a whole answer is an error with 200."""
    FAILED = "failed"
    """The answer ends as failed: `response.failed` of Responses; elsewhere as `error_event`."""
    BROKEN_JSON = "broken_json"
    """200, and a body or an event that is not JSON."""
    EMPTY_CHOICES = "empty_choices"
    """200, and `choices` is empty."""
    NO_MESSAGE = "no_message"
    """200, and the choice has neither message nor delta."""
    MISSING_USAGE = "missing_usage"
    """The right answer without token counts."""
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    """400: the prompt is too long."""
    CONTENT_FILTER = "content_filter"
    """The service refuses the prompt: 400, or 200 with a reason of Gemini."""
    REFUSAL = "refusal"
    """The model refuses, with `message`, in an answer that is otherwise right."""
    UNAUTHORIZED = "unauthorized"
    """401."""
    FORBIDDEN = "forbidden"
    """403."""
    NOT_FOUND = "not_found"
    """404: no such model."""


TRANSIENT = (
    FaultKind.RATE_LIMITED,
    FaultKind.SERVER_ERROR,
    FaultKind.OVERLOADED,
    FaultKind.RESET,
    FaultKind.RESET_MID_BODY,
    FaultKind.TRUNCATED_STREAM,
    FaultKind.ERROR_EVENT,
    FaultKind.BROKEN_JSON,
    FaultKind.EMPTY_CHOICES,
    FaultKind.NO_MESSAGE,
)
"""Kinds that a client should retry at once; the default kinds of a rate."""


@dataclass(frozen=True)
class Fault:
    """One failure. `retry_after` (seconds) is sent with it, `after` is the wait before it."""

    kind: FaultKind | str
    retry_after: float | None = None
    after: float | None = None
    message: str | None = None

    def __post_init__(self) -> None:
        """Take the kind's name too; raises `ValueError` that lists the kinds."""
        try:
            object.__setattr__(self, "kind", FaultKind(self.kind))
        except ValueError:
            known = ", ".join(FaultKind)
            raise ValueError(f"{self.kind!r} is not a kind of fault; use one of: {known}") from None


@dataclass(frozen=True)
class Planned:
    """A fault for certain requests: None in `key`, `turn` (from 1) or `attempt` means any."""

    fault: Fault
    key: str | None = None
    turn: int | None = None
    attempt: int | None = 1

    def matches(self, key: str, turn: int, attempt: int) -> bool:
        """Return whether the fault is for this request."""
        wanted = ((self.key, key), (self.turn, turn), (self.attempt, attempt))
        return all(want is None or want == have for want, have in wanted)


@dataclass(frozen=True)
class Faults:
    """Planned faults, then a share (`rate`, 0 to 1) of all other requests, chosen by `seed`.

    `kinds` weighs the kinds of the rate. Attempts of one turn after the first `first_attempts`
    never fail by rate, so that a client that tries often enough gets through for certain.
    """

    planned: tuple[Planned, ...] = ()
    rate: float = 0.0
    kinds: Mapping[FaultKind | str, float] = field(
        default_factory=lambda: dict.fromkeys(TRANSIENT, 1.0)
    )
    seed: int = 0
    first_attempts: int | None = None
    retry_after: float | None = None

    def __post_init__(self) -> None:
        """Refuse rates, weights and kinds that cannot be; raises `ValueError`."""
        if not 0 <= self.rate <= 1:
            raise ValueError(f"Faults.rate is {self.rate}; it is a share from 0 to 1")
        weighed = {FaultKind(kind): float(weight) for kind, weight in self.kinds.items()}
        if min(weighed.values(), default=0.0) < 0 or not sum(weighed.values()):
            raise ValueError("Faults.kinds needs a weight above 0, and none below")
        object.__setattr__(self, "planned", tuple(self.planned))
        object.__setattr__(self, "kinds", weighed)

    def decide(self, key: str, turn: int, attempt: int) -> Fault | None:
        """Return what is wrong with this attempt, or None."""
        for plan in self.planned:
            if plan.matches(key, turn, attempt):
                return plan.fault
        if self.first_attempts is not None and attempt > self.first_attempts:
            return None
        place = (self.seed, key, turn, attempt)
        if not self.rate or draw("fault", *place) >= self.rate:
            return None
        kind = self._kind(draw("kind", *place))
        retry_after = self.retry_after if kind is FaultKind.RATE_LIMITED else None
        return Fault(kind, retry_after=retry_after)

    def _kind(self, drawn: float) -> FaultKind:
        kinds = [FaultKind(kind) for kind, weight in self.kinds.items() if weight]
        *bounds, total = accumulate(weight for weight in self.kinds.values() if weight)
        return kinds[bisect(bounds, drawn * total)]
