"""A worker of the protocol's model: makes attempts as a worker would, and decides with the product.

Knows neither hypothesis nor Redis. Every attempt carries its worker's token, so that whatever is
stored names its author.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from support.protocol.call_model import PATIENCE
from support.protocol.model import POISON, RETRY_WAIT, Decision, Step

from stepfleet.orchestrator import (
    Agent,
    AgentConfig,
    ContinuationCriteria,
    ErrorInfo,
    ErrorPolicy,
    ErrorType,
    FinishReason,
    LLMResponse,
    ToolCall,
    ToolCallRecord,
    UsageStats,
)
from stepfleet.orchestrator.agents.agent import criteria_of
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.attempt import (
    Answered,
    Attempt,
    Failed,
    Interrupted,
    Interruption,
    Parked,
    Prevented,
    Span,
    Wait,
    not_run,
)
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.commit_events import events_of
from stepfleet.orchestrator.protocol.guards import poisoned, prevented
from stepfleet.orchestrator.protocol.verdict import Facts, Move, Verdict, decide, held
from stepfleet.orchestrator.records.calls.tools import DENIED, NOT_EXECUTED

KINDS = (
    *["call"] * 4,
    *["park"] * 3,
    *("park one", "park for nothing"),
    *("answer", "broken", "transient", "limited", "error", "release"),
    *["out"] * 3,
)
CALLS = 2
IN_ORDER = frozenset({NOT_EXECUTED, DENIED})  # errors that fail no step
CIRCUIT = "0123456789ab"
OUT_WAIT = 1_800_000
LIMITS: dict[str, Any] = {
    "model": "openai:none",
    "max_steps": 4,
    "time_limit": None,
    "token_limit": None,
}
AGENTS = (
    Agent("strict", **LIMITS),
    Agent("lenient", error_policy=ErrorPolicy.retry_all(3), model_attempts=3, **LIMITS),
)


@dataclass
class Worker:
    """One worker with one step. `wants_cancel`: it has heard of a cancel.

    `places` has what calls wait for that are no tasks of a queue.
    """

    claim: Claim
    wants_cancel: bool = False
    sent: tuple[Verdict, Events, Decision] | None = None
    places: dict[int, Wait] = field(default_factory=dict)

    @property
    def token(self) -> str:
        return self.claim.token

    def hears_of_cancel(self) -> None:
        """Know from now on that the run is to be cancelled."""
        self.wants_cancel = True
        state = self.claim.state.model_copy(update={"stop_requested": "enough"})
        self.claim = replace(self.claim, state=state)

    def next_entries(self, size: int) -> tuple[LLMResponse | None, int | None, int | None]:
        """Return what it journals next: a response, a started call, or one with a result."""
        journal = self.claim.journal
        if journal.response is None:
            return response_of(self.token, size, calls=CALLS), None, None
        for index in range(CALLS):
            if index not in journal.started:
                return None, index, None
            if index not in journal.results:
                return None, None, index
        return None, None, None

    def noted(
        self, response: LLMResponse | None, started: int | None, record: ToolCallRecord | None
    ) -> None:
        """Remember what was journaled."""
        journal = self.claim.journal
        results = dict(journal.results)
        if record is not None:
            results[int(record.call_id[-1])] = record
        marks = journal.started | ({started} if started is not None else set())
        changed = replace(
            journal, response=response or journal.response, started=marks, results=results
        )
        self.claim = replace(self.claim, journal=changed)

    def decide(self, kind: str, size: int) -> tuple[Verdict, Events, Decision]:
        """Return what it commits after an attempt of that kind; remember it for repetitions."""
        claim = self.claim
        criteria = criteria_for(claim.config)
        attempt = self._attempt(kind, size, criteria)
        facts = Facts(claim.now, jitter=0.0)
        verdict = decide(claim, attempt, criteria, facts)
        if verdict.waiting:
            waiting = replace(verdict.waiting, patience=PATIENCE / 1000)
            verdict = replace(verdict, waiting=waiting)
        if isinstance(attempt, Parked):
            attempt = attempt if verdict.waiting else attempt.answer
        events = events_of(claim, attempt, verdict, facts)
        decision = Decision(
            move=verdict.move.value,
            step=_step(attempt) if verdict.logged else None,
            reason=verdict.stop_reason.value if verdict.stop_reason else "",
            delay=(OUT_WAIT if verdict.outage else RETRY_WAIT) if verdict.delay else 0,
            attempt=int(verdict.attempt),
            limited=int(verdict.move is Move.RETRY and kind == "limited"),
            pays=verdict.lost is not None,
            drops=verdict.dropped is not None,
            knows_cancel=self.wants_cancel,
            events=len(events),
            outage=verdict.outage is not None,
        )
        self.sent = (verdict, events, decision)
        return self.sent

    def hold(self, number: int) -> None:
        """Hand the step back to wait, as the request of that number holds its batch."""
        decision = Decision(move="release", knows_cancel=self.wants_cancel, hold=number)
        self.sent = (held(self.claim, number), Events([]), decision)

    def _attempt(self, kind: str, size: int, criteria: ContinuationCriteria) -> Attempt:
        claim, journal = self.claim, self.claim.journal
        span = Span(journal.began or claim.now, journal.spent + size / 2)
        outcome = poisoned(claim, POISON) or prevented(claim, criteria)
        if outcome:
            return Prevented(span, outcome)
        if kind == "release":
            answer = Answered(span, journal.response) if journal.response else None
            return Interrupted(span, Interruption.HANDED_BACK, answer)
        if self.wants_cancel and journal.response is None:
            return Interrupted(span, Interruption.CANCELLED)
        if journal.response is None and kind in {"transient", "limited", "error", "out"}:
            info = ErrorInfo(type=ErrorType.MODEL, code="MODEL_ERROR", message=self.token)
            passing = kind != "error"
            wait = RETRY_WAIT / 1000
            outage = (CIRCUIT,) if kind == "out" else ()
            return Failed(span, info, passing, kind == "limited", wait, outage=outage)
        calls = 0 if kind == "answer" else CALLS
        response = journal.response or response_of(self.token, size, calls=calls)
        records = tuple(
            journal.results.get(index)
            or record_of(claim, index, broken=kind == "broken" and index == CALLS - 1)
            for index in range(len(response.tool_calls or ()))
        )
        texts = tuple(record.call_id for record in records)
        assert response.usage is not None
        open_calls = [index for index in range(len(records)) if index not in journal.results]
        if kind.startswith("park") and journal.response and open_calls and not claim.overdue:
            most = {"park one": 1, "park for nothing": 0}.get(kind)
            waits = open_calls[:most]
            return self._parked(span, journal.response, waits)
        return Answered(span, response, records, texts, response.usage.total_tokens * 0.25)

    def _parked(self, span: Span, response: LLMResponse, open_calls: list[int]) -> Parked:
        results = self.claim.journal.results
        records = tuple(
            results.get(index) or not_run(call, Interruption.CANCELLED, self.claim.now)
            for index, call in enumerate(response.tool_calls or ())
        )
        assert response.usage is not None
        texts = tuple(record.call_id for record in records)
        answer = Answered(span, response, records, texts, response.usage.total_tokens * 0.25)
        waits = (self.places.get(index) or Wait(index, "heavy", "look") for index in open_calls)
        return Parked(span, tuple(waits), answer)


@cache
def _criteria(text: str) -> ContinuationCriteria:
    return criteria_of(AgentConfig.from_json(text))


def criteria_for(config: AgentConfig) -> ContinuationCriteria:
    """Return the criteria of a configuration."""
    return _criteria(config.to_json())


def response_of(token: str, size: int, *, calls: int) -> LLMResponse:
    """Return an answer by `token` that used `size` tokens and asks for so many tools."""
    asked = tuple(ToolCall(id=f"c{index}", name="look", arguments={}) for index in range(calls))
    return LLMResponse(
        content=token,
        tool_calls=asked or None,
        usage=UsageStats(prompt_tokens=size, total_tokens=size),
        finish_reason=FinishReason.TOOL_CALLS if asked else FinishReason.STOP,
    )


def record_of(claim: Claim, index: int, *, broken: bool = False) -> ToolCallRecord:
    """Return what came of a tool call in the hands of the claim's owner."""
    info = ErrorInfo(type=ErrorType.TOOL, code="TOOL_EXECUTION_ERROR", message="broken")
    return ToolCallRecord(
        tool_name="look",
        call_id=f"c{index}",
        arguments={},
        result=None if broken else claim.token,
        is_error=broken,
        error=info if broken else None,
        timestamp=claim.now,
    )


def _step(attempt: Attempt) -> Step:
    """Return what the model is to know of a committed attempt."""
    time = round(attempt.span.seconds * 2)
    attempt = attempt.answer if isinstance(attempt, Interrupted) and attempt.answer else attempt
    if not isinstance(attempt, Answered):
        return Step(failed=True, time=time)
    records = attempt.records
    tokens = attempt.response.usage.total_tokens if attempt.response.usage else 0
    return Step(
        failed=any(one.error and one.error.code not in IN_ORDER for one in records),
        author=attempt.response.content,
        results={
            index: str(record.result) for index, record in enumerate(records) if not record.is_error
        },
        tokens=tokens,
        calls=1,
        cost=tokens,
        time=time,
        below=sum(round(one.run.total_cost_usd * 4) for one in records if one.run),
    )
