"""The client of a fleet: submit runs and batches, read results, steer runs.

One implementation, asynchronous; `sync.Fleet` is a facade over it. Makes no model call and
runs no tool: workers do.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.overrides import stored_overrides
from stepfleet.orchestrator.batches.lines import parse_metadata
from stepfleet.orchestrator.batches.source import Given
from stepfleet.orchestrator.batches.submit import BatchOrder
from stepfleet.orchestrator.client.batch import AsyncBatch
from stepfleet.orchestrator.client.follow import Steps
from stepfleet.orchestrator.client.history.history import RunHistory, checked_id
from stepfleet.orchestrator.client.inputs import Input, messages_of, origin_of
from stepfleet.orchestrator.client.runs import (
    FleetCache,
    FleetPurge,
    RunCosts,
    RunDisplay,
    RunToolTraces,
)
from stepfleet.orchestrator.client.session import Client
from stepfleet.orchestrator.errors import ConfigurationError, RunFailed
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.records.run.results import AgentRunResult, RunStatus
from stepfleet.orchestrator.store.runs.submission import NewRun

__all__ = ["AsyncBatch", "AsyncFleet"]

LONGEST_DELAY = 366 * 24 * 3600


class AsyncFleet(RunDisplay, RunHistory, RunCosts, RunToolTraces, FleetCache, FleetPurge):
    """A fleet as its client sees it. Connects at its first use, in the loop of that use.

    Without a Redis in the arguments, the environment or `stepfleet.toml` it joins the private
    server of the folder `.stepfleet`, where `stepfleet up` or `stepfleet run` has made one.
    `brings` names agents whose workers the caller starts: running workers need not have them.
    """

    async def submit(
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
        """Submit one run and return its id; workers take it up after `delay` seconds.

        `input` is text, a conversation, or another run's result, whose answer is handed over.
        `parent` is the id of the run that this one works for. `overrides` are fields of the
        agent's configuration for this run. Submitting a `run_id` (UUID) again changes nothing.
        Raises `ConfigurationError` that names field and fix.
        """
        client = await self._open()
        config = await client.config_of(agent)
        own = stored_overrides(config, overrides)
        run = NewRun(
            run_id=checked_id(run_id),
            agent=config.name,
            config=config.digest,
            messages=messages_of(input),
            max_steps=config.with_overrides(own).max_steps,
            overrides=own,
            metadata=parse_metadata(dict(metadata) if metadata else None),
            parent=await _checked_parent(client, parent),
            delay=_checked_delay(delay),
            origin=origin_of(input),
        )
        await client.accept([config])
        await client.store.configs.save(config)
        if await client.submission.create(run):
            await client.submission.publish([run])
        return run.run_id

    async def run_with_steps(
        self,
        agent: Agent | str,
        input: Input,  # noqa: A002 - the public name
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the run goes on behind it
        **options: Any,
    ) -> AgentRunResult:
        """Submit one run, wait for its end and return its result, however it ended.

        `options` are those of `submit`. Raises `TimeoutError` after `timeout` seconds.
        """
        return await self.wait(await self.submit(agent, input, **options), timeout)

    async def run(self, agent: Agent | str, prompt: Input, **options: Any) -> str:
        """Submit one run, wait for its end and return its text.

        A run that stops at a limit gives its last text. Raises `RunFailed`, with the result,
        for one that ends in error or is cancelled.
        """
        return _text_of(await self.run_with_steps(agent, prompt, **options))

    async def run_with_messages(
        self, agent: Agent | str, messages: Sequence[Message | Mapping[str, Any]], **options: Any
    ) -> str:
        """Do as `run`, from a conversation instead of a prompt."""
        return _text_of(await self.run_with_steps(agent, messages, **options))

    async def run_stream(self, agent: Agent | str, prompt: Input, **options: Any) -> Steps:
        """Submit one run and yield its steps as they are committed, until it has ended."""
        async for step in self.steps(await self.submit(agent, prompt, **options)):
            yield step

    async def submit_batch(
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
    ) -> AsyncBatch:
        """Submit a batch: a JSONL file, `-` for standard input, or dicts.

        Lines have `id`, `input` and optionally `agent`, `metadata` and `overrides`, or are
        OpenAI batch requests. `agent` is for lines that name none; `agents` are further ones as
        code, other names are those that workers announced. All lines are checked before any
        becomes a run; `skip_invalid` submits the good ones anyway. The same lines, agents and
        overrides, or the same `idempotency_key`, are the same batch: submitting again completes
        an interrupted submission. A few thousand creations are in flight at a time, so memory
        here stays the same for any number of lines, and a slow Redis slows the submission down.
        `on_progress` is told how many runs are there so far. Raises `ConfigurationError` that
        lists the bad lines, `StoreError` when Redis stays out of reach.
        """
        client = await self._open()
        known = {key: one.config for key, one in (agents or {}).items()}
        if isinstance(agent, Agent):
            known[agent.name] = agent.config
        order = BatchOrder(
            source=source,
            default_agent=agent.name if isinstance(agent, Agent) else agent,
            agents=known,
            overrides=overrides,
            idempotency_key=idempotency_key,
            skip_invalid=skip_invalid,
            name=name,
            on_progress=on_progress,
        )
        done = await client.batch_submission.submit(order, client.accept)
        return AsyncBatch(
            client, done.manifest, skipped=done.skipped, skipped_count=done.skipped_count
        )

    async def batch(self, batch_id: str) -> AsyncBatch:
        """Return a submitted batch. Raises `ConfigurationError` if there is none of that id."""
        client = await self._open()
        return AsyncBatch(client, await client.batches.get(batch_id))

    async def batches(self, limit: int = 50) -> list[BatchProgress]:
        """Return the progress of the newest batches."""
        return await (await self._open()).batches.newest(limit)


async def _checked_parent(client: Client, parent: str | None) -> str | None:
    if parent is not None:
        await client.snapshots.standing(checked_id(parent))
    return parent


def _checked_delay(delay: float) -> float:
    if not 0 <= delay <= LONGEST_DELAY:
        msg = f"delay is {delay}; write seconds from 0 to {LONGEST_DELAY:,}"
        raise ConfigurationError(msg)
    return delay


def _text_of(result: AgentRunResult) -> str:
    if result.status in (RunStatus.ERROR, RunStatus.CANCELLED):
        said = result.error or "it was cancelled"
        raise RunFailed(f"run {result.run_id} ended as {result.status}: {said}", result=result)
    return result.output or ""
