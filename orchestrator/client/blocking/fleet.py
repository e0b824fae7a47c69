"""The fleet for plain code: the same verbs, each run in one event loop of a thread of its own.

Holds no logic: `fleet.AsyncFleet` does everything.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.batches.source import Given
from stepfleet.orchestrator.client.blocking.batch import Batch
from stepfleet.orchestrator.client.blocking.cache import SyncCache
from stepfleet.orchestrator.client.blocking.history import SyncHistory
from stepfleet.orchestrator.client.blocking.purge import SyncPurge
from stepfleet.orchestrator.client.blocking.runs import SyncRuns
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.client.inputs import Input
from stepfleet.orchestrator.client.portal import Portal
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.records.steps import StepResult
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.fleet_overview import FleetOverview

__all__ = ["Batch", "Fleet"]


class Fleet(SyncRuns, SyncHistory, SyncCache, SyncPurge):
    """A fleet as its client sees it; see `AsyncFleet` for what each verb does.

    Use it as a context manager, or `close` it; one that is forgotten is closed when it is
    collected or the interpreter ends. One that was made, or used, before the process was forked
    (by a pool of workers, say) connects anew in the child.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        broker_url: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._fleet = AsyncFleet(redis_url, broker_url=broker_url, settings=settings)
        self._portal = Portal(self._fleet.aclose, self._fleet.forget)

    def __enter__(self) -> Self:
        self.check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect."""
        self._portal.close()

    def check(self) -> None:
        """Make sure that Redis answers and lets us in."""
        self._portal.call(self._fleet.check())

    def warnings(self) -> list[str]:
        """Return what about the Redis server endangers runs."""
        return self._portal.call(self._fleet.warnings())

    def overview(self) -> FleetOverview:
        """Return what is going on."""
        return self._portal.call(self._fleet.overview())

    def submit(
        self,
        agent: Agent | str,
        input: Input,  # noqa: A002 - the public name
        *,
        run_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        delay: float = 0.0,
        parent: str | None = None,
        **overrides: Any,
    ) -> str:
        """Submit one run and return its id."""
        work = self._fleet.submit(
            agent,
            input,
            run_id=run_id,
            metadata=metadata,
            delay=delay,
            parent=parent,
            **overrides,
        )
        return self._portal.call(work)

    def run_with_steps(
        self,
        agent: Agent | str,
        input: Input,  # noqa: A002 - the public name
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> AgentRunResult:
        """Submit one run, wait for its end and return its result, however it ended."""
        work = self._fleet.run_with_steps(agent, input, timeout=timeout, **options)
        return self._portal.call(work)

    def run(self, agent: Agent | str, prompt: Input, **options: Any) -> str:
        """Submit one run, wait for its end and return its text."""
        return self._portal.call(self._fleet.run(agent, prompt, **options))

    def run_with_messages(
        self, agent: Agent | str, messages: Sequence[Message | Mapping[str, Any]], **options: Any
    ) -> str:
        """Do as `run`, from a conversation instead of a prompt."""
        return self._portal.call(self._fleet.run_with_messages(agent, messages, **options))

    def run_stream(self, agent: Agent | str, prompt: Input, **options: Any) -> Iterator[StepResult]:
        """Submit one run and yield its steps as they are committed, until it has ended."""
        return self._portal.each(self._fleet.run_stream(agent, prompt, **options))

    def submit_batch(
        self,
        source: Given,
        agent: Agent | str | None = None,
        *,
        agents: Mapping[str, Agent] | None = None,
        idempotency_key: str | None = None,
        skip_invalid: bool = False,
        name: str | None = None,
        on_progress: Callable[[int], None] | None = None,
        **overrides: Any,
    ) -> Batch:
        """Submit a batch: a JSONL file, `-` for standard input, or dicts.

        `on_progress` is called in another thread.
        """
        work = self._fleet.submit_batch(
            source,
            agent,
            agents=agents,
            idempotency_key=idempotency_key,
            skip_invalid=skip_invalid,
            name=name,
            on_progress=on_progress,
            **overrides,
        )
        return Batch(self._portal.call(work), self._portal, self._fleet.batch)

    def batch(self, batch_id: str) -> Batch:
        """Return a submitted batch."""
        found = self._portal.call(self._fleet.batch(batch_id))
        return Batch(found, self._portal, self._fleet.batch)

    def batches(self, limit: int = 50) -> list[BatchProgress]:
        """Return the progress of the newest batches."""
        return self._portal.call(self._fleet.batches(limit))
