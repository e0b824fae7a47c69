"""A store opened on a test's Redis, runs created in it, and steps driven by hand."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

from stepfleet.orchestrator import (
    Agent,
    ErrorInfo,
    ErrorType,
    FinishReason,
    LLMResponse,
    Message,
    StoredRun,
    ToolCall,
    ToolCallRecord,
    UsageStats,
)
from stepfleet.orchestrator.agents.agent import criteria_of
from stepfleet.orchestrator.protocol.attempt import Answered, Attempt, Failed, Span
from stepfleet.orchestrator.protocol.claim import Claim, Committed, Refusal, Work
from stepfleet.orchestrator.protocol.commit_events import events_of
from stepfleet.orchestrator.protocol.verdict import Facts, Verdict, decide
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.runs.control import Control
from stepfleet.orchestrator.store.runs.reading import RunReader
from stepfleet.orchestrator.store.runs.steps import IsolationMarks, StepStore
from stepfleet.orchestrator.store.runs.submission import NewRun, RunSubmission
from stepfleet.orchestrator.store.store import Store, open_store

USAGE = UsageStats(prompt_tokens=10, completion_tokens=5, total_tokens=15)


def plain_agent(**config: Any) -> Agent:
    """Return an agent without tools, its model never called."""
    return Agent("plain", model="openai:none", instructions="Be brief.", **config)


@dataclass
class Bench:
    """Everything that a test of the protocol takes in hand."""

    opened: Store
    steps: StepStore
    submission: RunSubmission
    runs: RunReader
    control: Control
    agent: Agent
    tokens: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def marks(self) -> IsolationMarks:
        """What counts the deaths of processes."""
        return self.opened.marks

    async def create(self, batch: str = "b1", **fields: Any) -> str:
        """Create a run and return its id."""
        run_id = str(uuid4())
        digest = await self.opened.configs.save(self.agent.config)
        run = NewRun(
            run_id=run_id,
            agent=self.agent.name,
            config=digest,
            messages=(Message.user("hello"),),
            max_steps=self.agent.config.max_steps,
            model=self.agent.config.model,
            batch_id=batch,
            **fields,
        )
        assert await self.submission.create(run)
        return run_id

    def token(self) -> str:
        """Return a token that was not used yet."""
        return f"t{next(self.tokens)}"

    async def claim(self, run_id: str, step: int = 0, token: str | None = None) -> Claim:
        """Claim a step that must be free."""
        claim = await self.steps.claim(Work(run_id, step), token or self.token())
        assert isinstance(claim, Claim), claim
        return claim

    async def refused(self, run_id: str, step: int = 0) -> Refusal:
        """Claim a step that must not be free."""
        refusal = await self.steps.claim(Work(run_id, step), self.token())
        assert isinstance(refusal, Refusal), refusal
        return refusal

    def verdict(self, claim: Claim, attempt: Attempt) -> Verdict:
        """Decide on an attempt as a worker would."""
        facts = Facts(claim.now + timedelta(seconds=attempt.span.seconds))
        return decide(claim, attempt, criteria_of(claim.config, self.agent), facts)

    async def commit(self, claim: Claim, attempt: Attempt) -> Committed:
        """Decide and commit."""
        verdict = self.verdict(claim, attempt)
        facts = Facts(claim.now)
        return await self.steps.commit(claim, verdict, events_of(claim, attempt, verdict, facts))

    async def header(self, run_id: str) -> dict[str, str]:
        """Return a run's header."""
        return dict(await self.opened.connection.execute("HGETALL", self.opened.keys.run(run_id)))

    async def due(self, run_id: str) -> float | None:
        """Return when the run needs attention, or None if it is in no index."""
        key = self.opened.keys.due(self.opened.keys.shard_of(run_id))
        score = await self.opened.connection.execute("ZSCORE", key, run_id)
        return None if score is None else float(score)

    async def counters(self, batch: str = "b1") -> dict[str, int]:
        """Return a batch's counters, summed over the shards; zeros are left out."""
        total: dict[str, int] = {}
        for shard in range(self.opened.keys.shards):
            key = self.opened.keys.batch(shard, batch)
            for name, value in (await self.opened.connection.execute("HGETALL", key)).items():
                total[name] = total.get(name, 0) + int(value)
        return {name: value for name, value in total.items() if value}

    async def keep_up(self) -> None:
        """Look after batches as a worker does now and then."""
        await self.opened.upkeep.settle_all()

    async def queued(self) -> int:
        """Return how many messages wait."""
        return await self.opened.dispatch.waiting()

    async def stored(self, run_id: str) -> StoredRun:
        """Read a run as a client does."""
        return await self.runs.get(run_id)


def with_settings(store: Store, **changes: Any) -> Store:
    """Return the same open store with other settings."""
    return replace(store, settings=store.settings.model_copy(update=changes))


def with_gateways(store: Store, **gateways: Any) -> Store:
    """Return the same open store with other gateways."""
    other = replace(store)
    vars(other).update(gateways)
    return other


@asynccontextmanager
async def bench(url: str, agent: Agent | None = None, **settings: Any) -> AsyncIterator[Bench]:
    """Open the store at `url`."""
    opened = await open_store(load_settings(redis_url=url, **settings), worker="test")
    try:
        yield Bench(
            opened=opened,
            steps=opened.steps,
            submission=opened.submission,
            runs=opened.runs,
            control=opened.control,
            agent=agent or plain_agent(),
        )
    finally:
        await opened.aclose()


def answered(claim: Claim, text: str = "fine", seconds: float = 0.5) -> Answered:
    """Return an attempt that ends the run: text and no tools."""
    return Answered(Span(claim.now, seconds), LLMResponse(content=text, usage=USAGE), cost_usd=0.25)


def called(claim: Claim, *, error: bool = False, seconds: float = 0.5) -> Answered:
    """Return an attempt after which the run goes on: one tool call with its result."""
    call = ToolCall(id=f"c{claim.step}", name="look", arguments={"at": claim.step})
    info = ErrorInfo(type=ErrorType.TOOL, code="TOOL_EXECUTION_ERROR", message="broken")
    record = ToolCallRecord(
        tool_name="look",
        call_id=call.id,
        arguments=call.arguments,
        result=None if error else claim.step,
        is_error=error,
        error=info if error else None,
        timestamp=claim.now,
    )
    response = LLMResponse(
        content="looking", tool_calls=(call,), usage=USAGE, finish_reason=FinishReason.TOOL_CALLS
    )
    span = Span(claim.now, seconds)
    return Answered(span, response, (record,), (str(record.result),), cost_usd=0.25)


def failed(claim: Claim, *, transient: bool = False, limited: bool = False) -> Failed:
    """Return an attempt whose model call failed."""
    info = ErrorInfo(type=ErrorType.MODEL, code="MODEL_ERROR", message="no answer")
    return Failed(Span(claim.now, 0.5), info, transient=transient, limited=limited)
