"""Decides how a request is answered, and keeps requests with their outcomes.

Written by the server's thread only; every reading returns a copy and may come from any thread.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

import orjson

from stepfleet.worker.testing.openai.answers import estimate
from stepfleet.worker.testing.openai.conversation import Violation
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.rate_limits import Admission, RateLimiter, RateStanding
from stepfleet.worker.testing.rules import Rules, choose
from stepfleet.worker.testing.scenario import (
    Fault,
    FaultKind,
    Faults,
    HttpAnswer,
    Prompt,
    PromptCache,
    Reply,
    Usage,
)
from stepfleet.worker.testing.wire import Wire

_EXHAUSTED = 1e6
"""Requests per minute in the headers of a 429 that no limit but a planned fault has caused."""


@dataclass(frozen=True)
class Judgement:
    """An answer, and why: the violation in the request, or the verdict of the rate limits."""

    answer: HttpAnswer
    violation: Violation | None = None
    admission: Admission | None = None

    @property
    def is_admitted(self) -> bool:
        """Whether a rate limit counts the request among those in flight."""
        return self.admission is not None and not self.admission.refused


@dataclass
class SimulatedService:
    """What one server follows; all may change while it runs.

    `context_window` is in tokens; None means no limit.
    """

    rules: Rules
    faults: Faults
    limiter: RateLimiter = field(default_factory=RateLimiter)
    context_window: int | None = None
    cache: PromptCache = field(default_factory=PromptCache)

    def decide(self, request: RequestRecord, wire: Wire, now: float) -> Judgement:
        """Return the answer to a request that arrived at `now`, in seconds."""
        choice = choose(request, self.rules, self.faults)
        if choice.violation is not None:
            return Judgement(wire.refusing(choice.violation), choice.violation)
        prompt, reply, fault = wire.prompt(request), choice.reply, choice.fault
        usage = reply.usage or self._usage(prompt, reply, now)
        if self.context_window is not None and prompt.tokens > self.context_window:
            why = wire.too_long(prompt.tokens, self.context_window)
            fault = Fault(FaultKind.CONTEXT_LENGTH_EXCEEDED, message=why)
            return Judgement(wire.failing(fault, HttpAnswer(str(fault.kind))))
        admission = self._admit(request, wire, usage, now)
        if admission is not None and admission.refused:
            return Judgement(_limited(wire, admission), admission=admission)
        answer = wire.replying(request, replace(reply, usage=usage))
        if fault is not None:
            answer = wire.failing(fault, answer)
        if answer.status == HTTPStatus.OK and answer.pieces:
            self.cache.keep(prompt, now)
        headers = _service_headers(wire, admission, fault)
        answer = replace(answer, headers={**headers, **answer.headers}) if headers else answer
        return Judgement(answer, admission=admission)

    def _usage(self, prompt: Prompt, reply: Reply, now: float) -> Usage:
        return self.cache.usage(prompt, estimate(prompt.tokens, reply), now)

    def _admit(
        self, request: RequestRecord, wire: Wire, usage: Usage, now: float
    ) -> Admission | None:
        if not self.limiter.limits:
            return None
        if wire.free_reads:
            usage = replace(usage, prompt_tokens=usage.prompt_tokens - usage.cached_tokens)
        return self.limiter.admit(request.model, request.account, usage, now)


def _limited(wire: Wire, admission: Admission) -> HttpAnswer:
    kind = FaultKind.RATE_LIMITED
    fault = Fault(kind, retry_after=admission.wait, after=0.0, message=admission.message)
    answer = wire.failing(fault, HttpAnswer(str(kind)))
    exact = (
        {"Retry-After": f"{math.ceil(admission.wait)}"} if "Retry-After" in answer.headers else {}
    )
    given = wire.limit_headers(admission.standings, admission.wait)
    return replace(answer, headers={**answer.headers, **exact, **given})


def _service_headers(
    wire: Wire, admission: Admission | None, fault: Fault | None
) -> Mapping[str, str]:
    if admission is not None:
        return wire.limit_headers(admission.standings, None)
    if fault is None or fault.kind is not FaultKind.RATE_LIMITED:
        return {}
    wait = fault.retry_after
    standing = RateStanding(_EXHAUSTED, 0.0, 1.0 if wait is None else wait)
    return wire.limit_headers({"requests": standing}, wait)


_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens", "cache_write_tokens")
_SECRET = ("authorization", "cookie", "key", "token", "secret")


class RequestLog:
    """The newest `keep` requests (None: all), counts of all, and a JSONL file if `path` is given.

    The file gets one line per request when it has ended, without bodies: `at` is the epoch
    second, `received` and `answered` are seconds of the machine's monotonic clock. A rate limit
    admits a request, or refuses it (`limited` names which one did), at `received`.
    """

    def __init__(self, *, keep: int | None = None, path: Path | None = None) -> None:
        self.in_flight = 0
        self.most_in_flight = 0
        self.total = 0
        self._ended: deque[RequestRecord] = deque(maxlen=keep)
        self._open: dict[int, RequestRecord] = {}
        self._attempts: Counter[tuple[str, int]] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._violations: deque[str] = deque(maxlen=1000)
        self._file: IO[bytes] | None = path.open("ab") if path else None

    @property
    def requests(self) -> tuple[RequestRecord, ...]:
        """The requests in order of arrival, open ones among them."""
        both = {
            one.number: one for one in (*tuple(self._open.copy().values()), *self._ended.copy())
        }
        return tuple(both[number] for number in sorted(both))

    @property
    def violations(self) -> tuple[str, ...]:
        """The errors of refused requests, the newest 1,000."""
        return tuple(self._violations.copy())

    @property
    def counts(self) -> dict[tuple[str, int], int]:
        """How often each turn of each conversation was requested, by (key, turn)."""
        return dict(self._attempts.copy())

    @property
    def outcomes(self) -> dict[str, int]:
        """How many requests ended in which way."""
        return dict(self._outcomes.copy())

    def begin(
        self,
        key: str,
        turn: int,
        body: dict[str, Any],
        headers: Mapping[str, str],
        sent: dict[str, Any] | None = None,
        account: str = "",
    ) -> RequestRecord:
        """Record a request that has arrived whole; `sent` is its body where `body` is another."""
        self._attempts[key, turn] += 1
        self.total += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        request = RequestRecord(
            self.total,
            key,
            turn,
            self._attempts[key, turn],
            body,
            headers,
            time.monotonic(),
            sent=body if sent is None else sent,
            account=account,
        )
        self._open[request.number] = request
        return request

    def refuse(self, violation: Violation) -> None:
        """Record a violation."""
        self._violations.append(str(violation))

    def decided(self, request: RequestRecord, decision: Judgement) -> RequestRecord:
        """Record the answer before it is sent, so that its client finds it in the log."""
        answer, violation, admission = decision.answer, decision.violation, decision.admission
        known = replace(
            request,
            answered=time.monotonic(),
            outcome=answer.outcome,
            status=answer.status if answer.pieces else None,
            usage=answer.usage,
            violation=str(violation) if violation else None,
            limited=admission.refused or None if admission else None,
        )
        self._open[request.number] = known
        return known

    def disconnected(self, request: RequestRecord) -> RequestRecord:
        """Record that the client disconnected before it had the answer."""
        hung = self._open[request.number].outcome == FaultKind.HANG
        outcome = str(FaultKind.HANG) if hung else "disconnected"
        gone = replace(request, answered=time.monotonic(), outcome=outcome, usage=None)
        self._open[request.number] = gone
        return gone

    def end(self, request: RequestRecord) -> None:
        """Record the end of the request, with its last known outcome."""
        ended = self._open[request.number]
        self._ended.append(ended)
        del self._open[request.number]  # not before: who has the answer finds the request
        self.in_flight -= 1
        self._outcomes[str(ended.outcome)] += 1
        if self._file is not None:
            self._file.write(_line(ended))
            self._file.flush()

    def clear(self) -> None:
        """Forget violations and ended requests; attempts are still counted on."""
        self._violations.clear()
        self._ended.clear()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def without_secrets(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers, lower case, with the value of every secret one replaced."""
    lowered = {name.lower(): value for name, value in headers.items()}
    return {
        name: "[secret]" if any(word in name for word in _SECRET) else value
        for name, value in lowered.items()
    }


def _line(request: RequestRecord) -> bytes:
    usage = request.usage
    names = ["key", "turn", "attempt", "outcome", "status", "received", "answered"]
    fields = {
        "number": request.number,
        "at": time.time(),
        **{name: getattr(request, name) for name in names},
        "model": request.body.get("model"),
        "messages": len(request.messages),
        "stream": request.streams,
        **{name: usage and getattr(usage, name) for name in _COUNTS},
        "account": request.account,
        "limited": request.limited,
        "violation": request.violation,
    }
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
