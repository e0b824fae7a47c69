"""Decides which requests fail, and how. Pure: by place in a conversation, or by a seeded rate.

Must not know how a failure is put on the wire.
"""

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate

from stepfleet.worker.testing.scenario.latency import draw


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
            raise ValueError(f"{self.kind!r} is no kind of fault; use one of: {known}") from None


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
