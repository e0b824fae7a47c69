"""What a step needs from the outside: every collaborator of `step.py`, as protocols."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.agents.reasoner import Reasoner
from stepfleet.orchestrator.continuation import ContinuationCriteria
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.memory.policy import Memory
from stepfleet.orchestrator.memory.pruning import Count, CustomPolicy, estimate_tokens
from stepfleet.orchestrator.models.pricing import Cost
from stepfleet.orchestrator.protocol.claim import Claim, Committed, Held, Refusal, StepHint
from stepfleet.orchestrator.protocol.lost_attempts import NO_ENTRIES, CallEntries
from stepfleet.orchestrator.protocol.verdict import Verdict
from stepfleet.orchestrator.protocol.waiting import Delivered, TakenCall, ToolHint
from stepfleet.orchestrator.records.calls.answers import Awaited, RunEnd
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.errors import ErrorInfo
from stepfleet.orchestrator.records.memory_window import Remembered
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.tools import CallStatus, Tool, ToolInvocation, ToolRegistry
from stepfleet.worker.engine.concurrency import ConcurrencyLimiter
from stepfleet.worker.leases.lease import AnyLease, Lease

log = logging.getLogger(__name__)

Call = Callable[[ModelRequest], Awaitable[LLMResponse]]
"""Makes a model call. Raises `ModelError`."""
Around = Callable[[Call], Call]
"""Goes around a call of a provider."""


class Store(Protocol):
    """Claim, journal, commit."""

    async def claim(self, hint: StepHint, token: str) -> Claim | Refusal:
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

    async def take(self, hint: ToolHint, token: str) -> TakenCall | Refusal:
        """Take a call, or be refused."""

    async def leave(
        self,
        hint: ToolHint,
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


class Toolbox(Protocol):
    """Executes tool calls."""

    async def execute(
        self,
        call: ToolCall,
        tools: ToolRegistry,
        invocation: ToolInvocation,
        *,
        clock: Callable[[], datetime],
    ) -> ToolCallRecord:
        """Run one call. A tool's error becomes the record's; only cancellation raises."""

    async def recall(
        self,
        call: ToolCall,
        tool: Tool[..., Any],
        invocation: ToolInvocation,
        *,
        clock: Callable[[], datetime],
    ) -> ToolCallRecord | CallStatus:
        """Query the tool's status hook for a call whose worker was lost."""

    async def needs_approval(
        self,
        call: ToolCall,
        tool: Tool[..., Any],
        invocation: ToolInvocation,
        *,
        clock: Callable[[], datetime],
    ) -> bool:
        """Query the tool's rule whether a call waits for a person."""

    def text(self, record: ToolCallRecord) -> str:
        """Return what the model reads of a record."""


class Circuits(Protocol):
    """Which services of models are out for the whole fleet."""

    @property
    def watched(self) -> bool:
        """Whether any service has failed lately: elsewhere nothing is looked up."""

    def refusal(self, service: str) -> str:
        """Return why no call of `service` is made; empty where it is."""

    async def failed(self, service: str, run_id: str, error: ModelError) -> str:
        """Note a failed call; return the circuit of the service where that is open."""

    async def answered(self, service: str) -> None:
        """Note an answered call."""


class Isolation(Protocol):
    """Has work that has lost its workers executed in isolated processes."""

    async def takes(self, lease: AnyLease, ports: "Ports") -> bool:
        """Return whether the work was, or will be, executed elsewhere."""


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
    worker lacks it. `elapsed` is a monotonic clock in seconds; `jitter` returns 0 to 1;
    `cost` prices a call in USD; `patience` is the delay in seconds before another worker gets a
    tool call whose code is not here; `tokens` returns what counts a message's tokens for a model;
    `hold` counts a run that is about to end with a permanent error, and returns the number of the
    request that holds its batch, or 0 where the run may end (see `protocol.holding`);
    `circuits` know which services are out, for which a step waits `outage_patience` seconds;
    `crash` is called at points where tests end the process; without `isolation` all work is
    executed in this process; `stop_run` cancels a run that the second one has started, and waits
    for no longer, and returns what is known of it; `attend` looks after a call that waits for
    another run or a person, and returns after how many seconds it is to be looked at again, if it
    has no answer by then;
    `successor` returns the stored configuration of the agent that goes on with a run, by its name,
    and raises `ConfigurationError` where nobody knows it; `admit` has a step call a model under
    that one's own limits and in its turn, and raises `ModelError` where these have no room.
    """

    store: Store
    calls: CallStore
    agent: Callable[[AgentConfig], AgentCode]
    toolbox: Toolbox
    cost: Cost
    elapsed: Callable[[], float]
    jitter: Callable[[], float]
    token: Callable[[], str]
    crash: Callable[[str], None]
    worker: str = ""
    poison_limit: int = 3
    patience: float = 5.0
    tokens: Callable[[str], Count] = lambda _: estimate_tokens
    isolation: Isolation | None = None
    pacing: ConcurrencyLimiter = field(default_factory=ConcurrencyLimiter)
    observers: tuple[StepObserver, ...] = ()
    hold: Callable[[Claim, ErrorInfo], Awaitable[int]] | None = None
    circuits: Circuits | None = None
    outage_patience: float = 86_400.0
    stop_run: Callable[[str, str], Awaitable[RunEnd | None]] | None = None
    attend: Callable[[TakenCall, Awaited, AgentCode], Awaitable[float]] | None = None
    successor: Callable[[str], Awaitable[AgentConfig]] | None = None
    admit: Callable[[Lease, ModelRequest], Awaitable[None]] | None = None

    async def claim(self, hint: StepHint, token: str) -> Claim | Refusal:
        """Claim a step by the store, seen by the observers. Raises `StoreError`."""
        self.crash("before-claim")
        claim = await self.store.claim(hint, token)
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

    async def take(self, hint: ToolHint, token: str) -> TakenCall | Refusal:
        """Take a tool call by the store, seen by the observers. Raises `StoreError`."""
        taken = await self.calls.take(hint, token)
        if isinstance(taken, TakenCall):
            self._tell(lambda observer: observer.call_taken(taken))
            self.crash("call-taken")
        return taken

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
