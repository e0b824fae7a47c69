"""Decides each answer: rules and faults, then the limits and the prompt cache of the service.

Only the clock comes from outside; knows no HTTP.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus

from stepfleet.worker.testing.openai.completions import estimate
from stepfleet.worker.testing.openai.conversation import Violation
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.rules import Rules, choose
from stepfleet.worker.testing.scenario.faults import Fault, FaultKind, Faults
from stepfleet.worker.testing.scenario.limits import Admission, RateLimiter, Standing
from stepfleet.worker.testing.scenario.prompt_cache import Prompt, PromptCache
from stepfleet.worker.testing.scenario.replies import Answer, Reply, Usage
from stepfleet.worker.testing.wire import Wire

_EXHAUSTED = 1e6
"""Requests per minute in the headers of a 429 that no limit but a planned fault has caused."""


@dataclass(frozen=True)
class Decision:
    """An answer, and why: the violation in the request, or the verdict of the rate limits."""

    answer: Answer
    violation: Violation | None = None
    admission: Admission | None = None

    @property
    def is_admitted(self) -> bool:
        """Whether a rate limit counts the request among those in flight."""
        return self.admission is not None and not self.admission.refused


@dataclass
class Service:
    """What one server follows; all may change while it runs.

    `context_window` is in tokens; None is no limit.
    """

    rules: Rules
    faults: Faults
    limiter: RateLimiter = field(default_factory=RateLimiter)
    context_window: int | None = None
    cache: PromptCache = field(default_factory=PromptCache)

    def decide(self, request: RequestRecord, wire: Wire, now: float) -> Decision:
        """Return the answer to a request that arrived at `now`, in seconds."""
        choice = choose(request, self.rules, self.faults)
        if choice.violation is not None:
            return Decision(wire.refusing(choice.violation), choice.violation)
        prompt, reply, fault = wire.prompt(request), choice.reply, choice.fault
        usage = reply.usage or self._usage(prompt, reply, now)
        if self.context_window is not None and prompt.tokens > self.context_window:
            why = wire.too_long(prompt.tokens, self.context_window)
            fault = Fault(FaultKind.CONTEXT_LENGTH_EXCEEDED, message=why)
            return Decision(wire.failing(fault, Answer(str(fault.kind))))
        admission = self._admit(request, wire, usage, now)
        if admission is not None and admission.refused:
            return Decision(_limited(wire, admission), admission=admission)
        answer = wire.replying(request, replace(reply, usage=usage))
        if fault is not None:
            answer = wire.failing(fault, answer)
        if answer.status == HTTPStatus.OK and answer.pieces:
            self.cache.keep(prompt, now)
        headers = _headers(wire, admission, fault)
        answer = replace(answer, headers={**headers, **answer.headers}) if headers else answer
        return Decision(answer, admission=admission)

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


def _limited(wire: Wire, admission: Admission) -> Answer:
    kind = FaultKind.RATE_LIMITED
    fault = Fault(kind, retry_after=admission.wait, after=0.0, message=admission.message)
    answer = wire.failing(fault, Answer(str(kind)))
    exact = (
        {"Retry-After": f"{math.ceil(admission.wait)}"} if "Retry-After" in answer.headers else {}
    )
    given = wire.limit_headers(admission.standings, admission.wait)
    return replace(answer, headers={**answer.headers, **exact, **given})


def _headers(wire: Wire, admission: Admission | None, fault: Fault | None) -> Mapping[str, str]:
    if admission is not None:
        return wire.limit_headers(admission.standings, None)
    if fault is None or fault.kind is not FaultKind.RATE_LIMITED:
        return {}
    wait = fault.retry_after
    standing = Standing(_EXHAUSTED, 0.0, 1.0 if wait is None else wait)
    return wire.limit_headers({"requests": standing}, wait)
