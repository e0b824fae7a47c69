"""A store of one run in memory: the rules of `claim`, `journal` and `commit`, without Redis.

It fences by token and step as the scripts do, and keeps what was written, for tests to look at.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from stepfleet.orchestrator import (
    AgentConfig,
    AgentState,
    LLMResponse,
    Message,
    ToolCallRecord,
)
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.claim import (
    Claim,
    Committed,
    Held,
    Journal,
    Losses,
    Refusal,
    Refused,
    Want,
    Work,
)
from stepfleet.orchestrator.protocol.lost_attempts import NO_ENTRIES, CallEntries
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.protocol.waiting import Delivered, TakenCall
from stepfleet.orchestrator.records.calls.answers import Answer
from stepfleet.orchestrator.records.memory_window import Remembered
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.records.state import StateInfo

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RUN = "r"


@dataclass
class FakeCalls:
    """The tool calls that the run of a store waits for."""

    store: "FakeStore"
    taken: dict[Work, str] = field(default_factory=dict)
    left: list[Work] = field(default_factory=list)

    async def take(self, hint: Work, token: str) -> TakenCall | Refusal:
        """Take a call that the run waits for."""
        run = self.store
        if hint.step != run.step or hint.index not in run.waits:
            return Refusal(Refused.STALE)
        if self.taken.setdefault(hint, token) != token:
            return Refusal(Refused.LEASED, "1000")
        assert run.open.response is not None
        call = (run.open.response.tool_calls or ())[hint.index]
        return TakenCall(hint, token, NOW, call, run.config, 1, place=run.waits[hint.index])

    async def leave(
        self,
        hint: Work,
        token: str,
        *,
        delay: float = 0.0,
        started: bool = True,
        lost: LostAttempt | None = None,
    ) -> None:
        """Give a call back."""
        if self.taken.get(hint) == token:
            del self.taken[hint]
            self.left.append(hint)

    async def deliver(
        self, taken: TakenCall, agent: str, record: ToolCallRecord, seconds: float
    ) -> Delivered:
        """Give a call's result to the run; the last one makes its step due."""
        run = self.store
        if self.taken.pop(taken.hint, None) != taken.token:
            return Delivered(applied=False)
        run.settle(taken.index, record)
        return Delivered(applied=True, left=len(run.waits))


@dataclass
class FakeStore:
    """A run, the lease on it, and what was written: `verdicts` of commits, `entries` of journals.

    `want` is a request to the run; `losses` are those of its open step.
    """

    config: AgentConfig
    state: AgentState = field(init=False)
    step: int = 0
    status: str = "in_progress"
    token: str = ""
    want: str = ""
    open: Journal = field(default_factory=Journal)
    losses: Losses = Losses()  # noqa: RUF009 - frozen
    attempts: int = 0
    limited: int = 0
    decided: bool = False
    waits: dict[int, str] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    events: list[Events] = field(default_factory=list)
    entries: list[CallEntries] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    claim_fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        info = StateInfo(id=RUN, started_at=NOW, updated_at=NOW, execution_started_at=NOW)
        self.state = AgentState(agent_id=RUN, info=info, messages=(Message.user("Hi"),))
        self.calls = FakeCalls(self)

    async def claim(self, hint: Work, token: str) -> Claim | Refusal:
        """Take the step; again under the same token."""
        self.writes.append("claim")
        refused = None
        if self.status != "in_progress":
            refused = Refused.PAUSED if self.status == "paused" else Refused.ENDED
        elif hint.step != self.step:
            refused = Refused.STALE if hint.step < self.step else Refused.AHEAD
        elif self.waits:
            refused = Refused.EARLY
        elif self.token not in {"", token}:
            refused = Refused.LEASED
        if refused:
            return Refusal(refused, "1000")
        self.token = token
        return Claim(
            RUN,
            self.step,
            token,
            NOW,
            self.state,
            self.config,
            self.open,
            attempts=self.attempts,
            limited=self.limited,
            losses=self.losses,
            decided=self.decided,
            **self.claim_fields,
        )

    async def journal(
        self,
        claim: Claim,
        seconds: float,
        *,
        response: LLMResponse | None = None,
        started: tuple[int, ...] = (),
        results: Mapping[int, ToolCallRecord] | None = None,
        remembered: Remembered | None = None,
        entries: CallEntries = NO_ENTRIES,
    ) -> Held:
        """Note what must not be done twice, if the step is still that worker's."""
        self.writes.append("journal")
        answer = response or self.open.response
        if not self._is_of(claim) or ((started or results) and answer is None):
            return Held(ours=False)
        self.entries.append(entries)
        self.open = replace(
            self.open,
            response=answer,
            started=self.open.started | (set() if self.want else set(started)),
            results={**self.open.results, **(results or {})},
            remembered=remembered or self.open.remembered,
        )
        return Held(ours=True, want=self.want)

    async def note_call(self, claim: Claim, seconds: float, *, made: bool) -> Held:
        """Renew."""
        self.writes.append("note_call")
        return Held(ours=self._is_of(claim), want=self.want)

    async def commit(self, claim: Claim, verdict: Verdict, events: Events) -> Committed:
        """Write a verdict, all or nothing; a cancel that it does not know of is told first."""
        self.writes.append("commit")
        if not self._is_of(claim):
            return Committed(applied=False, status=self.status)
        if self.want == Want.CANCEL and verdict.state.stop_requested is None:
            return Committed(applied=False, status=self.status, wanted=Want.CANCEL)
        self.verdicts.append(verdict)
        self.events.append(events)
        self.token = ""
        self._apply(verdict)
        if self.want == Want.PAUSE and self.status == "in_progress":
            self.status = "paused"
        return Committed(applied=True, status=self.status)

    def settle(
        self, index: int, record: ToolCallRecord | None, answer: Answer | None = None
    ) -> None:
        """Give the run what a call that it waits for came to."""
        del self.waits[index]
        if record is not None:
            self.open = replace(self.open, results={**self.open.results, index: record})
        if answer is not None:
            self.open = replace(self.open, answers={**self.open.answers, index: answer})

    def take_over(self) -> None:
        """Let another worker have the step."""
        self.token = "another"

    def _is_of(self, claim: Claim) -> bool:
        return (self.token, self.step) == (claim.token, claim.step)

    def _apply(self, verdict: Verdict) -> None:
        match verdict.move:
            case Move.RETRY:
                self.attempts += verdict.attempt
                self.limited += verdict.limited
            case Move.WAIT:
                assert verdict.waiting is not None
                self.waits = {one.index: one.queue for one in verdict.waiting.calls}
                waited = verdict.waiting
                self.open = replace(
                    self.open, spent=self.open.spent + waited.seconds, began=waited.began
                )
            case Move.CONTINUE | Move.FINISH:
                self.state, self.decided = verdict.state, True
                self.open, self.attempts, self.limited = Journal(), 0, 0
                self.step += verdict.logged is not None
                if verdict.move is Move.FINISH:
                    assert verdict.stop_reason is not None
                    self.status = verdict.stop_reason.value
