"""What a step needs from the outside, and what each attempt at one knows.

Protocols stand where a test has an implementation of its own, or where the step must not import
the one that there is, since it does I/O.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol, Self

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.agents.reasoner import Reasoner
from stepfleet.orchestrator.continuation import ContinuationCriteria
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.memory.policy import Memory
from stepfleet.orchestrator.memory.pruning import Count, CustomPolicy, estimate_tokens
from stepfleet.orchestrator.models.pricing import Cost
from stepfleet.orchestrator.protocol.attempt import Span
from stepfleet.orchestrator.protocol.claim import Claim, Committed, Held, Refusal, Work
from stepfleet.orchestrator.protocol.lost_attempts import NO_ENTRIES, CallEntries
from stepfleet.orchestrator.protocol.verdict import Verdict
from stepfleet.orchestrator.protocol.waiting import Delivered, TakenCall
from stepfleet.orchestrator.records.calls.answers import Awaited, RunEnd
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.errors import ErrorInfo
from stepfleet.orchestrator.records.memory_window import Remembered
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.records.usage import FailedCall, LostUse
from stepfleet.orchestrator.records.values import value_class
from stepfleet.orchestrator.tools import ToolRegistry
from stepfleet.worker.engine.concurrency import ConcurrencyLimiter
from stepfleet.worker.leases.lease import Lease
from stepfleet.worker.toolbox.box import LocalToolbox

log = logging.getLogger(__name__)

Call = Callable[[ModelRequest], Awaitable[LLMResponse]]
"""Makes a model call. Raises `ModelError`."""
Around = Callable[[Call], Call]
"""Goes around a call of a provider."""


class StepPort(Protocol):
    """Claim, journal, commit."""

    async def claim(self, hint: Work, token: str) -> Claim | Refusal:
        """Take a step, or be refused."""

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
        """Renew the lease and note what must not be done twice."""

    async def note_call(self, claim: Claim, seconds: float, *, made: bool) -> Held:
        """Renew the lease and note that a model call is made now, or that none was made so far."""

    async def commit(self, claim: Claim, verdict: Verdict, events: Events) -> Committed:
        """Write a verdict, all or nothing."""


class CallStore(Protocol):
    """Take, leave, deliver."""

    async def take(self, hint: Work, token: str) -> TakenCall | Refusal:
        """Take a call, or be refused."""

    async def leave(
        self,
        hint: Work,
        token: str,
        *,
        delay: float = 0.0,
        started: bool = True,
        lost: LostAttempt | None = None,
    ) -> None:
        """Give a call back to other workers."""

    async def deliver(
        self, taken: TakenCall, agent: str, record: ToolCallRecord, seconds: float
    ) -> Delivered:
        """Give a call's result to its run."""


class AgentCode(Protocol):
    """What of an agent is code on this worker."""

    @property
    def tools(self) -> ToolRegistry:
        """Its tools."""

    @property
    def handoffs(self) -> Mapping[str, str]:
        """The agents that may go on with its runs, by the names of the tools for that."""

    def criteria(self, config: AgentConfig) -> ContinuationCriteria:
        """Return the criteria of a run with that configuration."""

    def reasoner(self, config: AgentConfig) -> Reasoner | None:
        """Return how such a run asks and reads, or None for a plain one."""

    @property
    def context(self) -> Memory | None:
        """What it remembers beyond its conversations."""

    def memory_policy(self, reference: str) -> CustomPolicy:
        """Return its own memory policy. Raises `AgentMemoryError` where it has no such one."""

    def call_for(self, claim: Claim, made: Around) -> Call:
        """Return what makes the model calls of that step: `generate`, streamed to subscribers."""

    def starts_for(self, work: Claim | TakenCall) -> Callable[[ToolCall, datetime], None] | None:
        """Return what announces that a tool call starts, and when; None if nobody listens."""

    async def generate(self, request: ModelRequest, *, made: Around) -> LLMResponse:
        """Make one model call; `made` goes around that of the provider. Raises `ModelError`."""

    def service(self, request: ModelRequest) -> str:
        """Return the name of what answers the request: an address and a model."""

    def forget_answer(self, key: str) -> None:
        """Let the response cache drop an answer that has failed by what it means."""


Attend = Callable[[TakenCall, AgentCode], Awaitable[float]]
"""Does what a call that waits needs now, twice as well as once. Returns after how many seconds it
is to be looked at again, if it has no answer by then."""


class OpenCircuits(Protocol):
    """The services of models that are out for the whole fleet."""

    @property
    def watched(self) -> bool:
        """Whether any service has failed lately: elsewhere nothing is looked up."""

    def refusal(self, service: str) -> str:
        """Return why no call of `service` is made; empty where it is."""

    async def failed(self, service: str, run_id: str, error: ModelError) -> str:
        """Note a failed call; return the circuit of the service where that is open."""

    async def answered(self, service: str) -> None:
        """Note an answered call."""


class StepObserver:
    """Sees what becomes of steps and tool calls; this one ignores all of it.

    Called within the step: observers are quick; what they raise is logged.
    """

    def claimed(self, claim: Claim | Refusal) -> None:
        """A step was claimed, or refused."""

    def committed(
        self, claim: Claim, verdict: Verdict, events: Events, committed: Committed
    ) -> None:
        """A commit was answered."""

    def call_taken(self, taken: TakenCall) -> None:
        """A tool call was taken."""

    def call_delivered(
        self, taken: TakenCall, record: ToolCallRecord, delivered: Delivered
    ) -> None:
        """A delivery of a tool call's result was answered."""


@dataclass(frozen=True, slots=True)
class Ports:
    """All of them, composed once per worker process.

    `agent` finds an agent's code by configuration and raises `ConfigurationError` where this
    worker lacks it. `jitter` returns 0 to 1; `cost` prices a call in USD; `crash` is called at
    points where tests end the process; `patience` is the delay in seconds before another worker
    gets a tool call whose code is not here; `tokens` returns what counts a message's tokens for a
    model.
    `admit` has a step call a model under that one's own limits and in its turn, and raises
    `ModelError` where these have no room. `successor` returns the stored configuration of the
    agent that goes on with a run, by its name, and raises `ConfigurationError` where nobody knows
    it. `stop_run` cancels a run that the second one has started, and waits for no longer, and
    returns what is known of it. `attend` has what looks after calls that wait for
    another run or a person.
    `isolation` tells whether work that has lost workers was, or will be, executed in another
    process; without it all work is executed in this one. `hold` counts a run that is about to end
    with a permanent error, and returns the number of the request that holds its batch, or 0 where
    the run may end (see `protocol.holding`). `circuits` know which services are out, for which a
    step waits `outage_patience` seconds.
    """

    store: StepPort
    calls: CallStore
    agent: Callable[[AgentConfig], AgentCode]
    toolbox: LocalToolbox
    cost: Cost
    jitter: Callable[[], float]
    token: Callable[[], str]
    crash: Callable[[str], None]
    admit: Callable[["StepContext", ModelRequest], Awaitable[None]]
    successor: Callable[[str], Awaitable[AgentConfig]]
    stop_run: Callable[[str, str], Awaitable[RunEnd | None]]
    attend: Mapping[Awaited, Attend]
    worker: str = ""
    poison_limit: int = 3
    patience: float = 5.0
    tokens: Callable[[str], Count] = lambda _: estimate_tokens
    pacing: ConcurrencyLimiter = field(default_factory=ConcurrencyLimiter)
    observers: tuple[StepObserver, ...] = ()
    isolation: Callable[[Lease, "Ports"], Awaitable[bool]] | None = None
    hold: Callable[[Claim, ErrorInfo], Awaitable[int]] | None = None
    circuits: OpenCircuits | None = None
    outage_patience: float = 86_400.0

    async def claim(self, work: Work, token: str) -> Claim | TakenCall | Refusal:
        """Claim a step or a tool call, seen by the observers. Raises `StoreError`."""
        if work.index is not None:
            taken = await self.calls.take(work, token)
            if isinstance(taken, TakenCall):
                self._tell(lambda observer: observer.call_taken(taken))
                self.crash("call-taken")
            return taken
        self.crash("before-claim")
        claim = await self.store.claim(work, token)
        self._tell(lambda observer: observer.claimed(claim))
        if isinstance(claim, Claim):
            self.crash("after-claim")
        return claim

    async def commit(self, claim: Claim, verdict: Verdict, events: Events) -> Committed:
        """Commit by the store, seen by the observers. Raises `StoreError`."""
        self.crash("before-commit")
        committed = await self.store.commit(claim, verdict, events)
        self._tell(lambda observer: observer.committed(claim, verdict, events, committed))
        if not committed.wanted:
            self.crash("after-commit")
        return committed

    async def deliver(self, taken: TakenCall, record: ToolCallRecord, seconds: float) -> Delivered:
        """Deliver a result by the store, seen by the observers. Raises `StoreError`."""
        self.crash("call-made")
        delivered = await self.calls.deliver(taken, taken.config.name, record, seconds)
        self._tell(lambda observer: observer.call_delivered(taken, record, delivered))
        return delivered

    def _tell(self, tell: Callable[[StepObserver], None]) -> None:
        for observer in self.observers:
            try:
                tell(observer)
            except Exception:
                log.exception("an observer of steps failed")


@dataclass(slots=True)
class ModelCalls:
    """The model calls of an attempt at a step, as far as no record has them yet.

    `called` is the request while a model is called; `has_called` is set from the first call on, and
    `uncalled` while the store knows that there was none. `failed` has the calls that failed and are
    not in the ledger yet, with their errors; `entered` is how many it has, `lost` what these cost.
    `answers` are paid ones that no record has yet, by the models that were called; `journaled` is
    set once the newest of them is in the journal. `remembered` is memory work that is journaled.
    `admitted` is the model that may be called under the limits of the fleet, where it is not the
    agent's first.
    """

    remembered: Remembered | None
    uncalled: bool
    called: ModelRequest | None = None
    has_called: bool = False
    failed: list[tuple[Exception | None, FailedCall]] = field(default_factory=list)
    entered: int = 0
    lost: LostUse = LostUse()  # noqa: RUF009 - frozen
    answers: list[tuple[str, LLMResponse]] = field(default_factory=list)
    journaled: bool = False
    admitted: str = ""


@value_class(frozen=True, slots=True)
class StepContext:
    """What an attempt at a step knows: its claim and lease, the calls it has made, the ports."""

    claim: Claim
    lease: Lease
    calls: ModelCalls
    ports: Ports

    @classmethod
    def of(cls, claim: Claim, lease: Lease, ports: Ports) -> Self:
        """Return the context at the beginning of an attempt."""
        return cls(claim, lease, ModelCalls(claim.journal.remembered, claim.uncalled), ports)

    @property
    def span(self) -> Span:
        """When the step started, and how long it has taken.

        A step that has waited for tool calls has parts: their times add up, and the calls' own.
        """
        journal = self.claim.journal
        return Span(journal.began or self.claim.now, journal.spent + self.lease.seconds)
