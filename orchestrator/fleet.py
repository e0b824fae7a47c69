"""The client of a fleet: submit runs and batches, read results, steer runs.

One implementation, asynchronous; `sync.Fleet` is a facade over it. Makes no model call and
runs no tool: workers do.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import UUID, uuid4

from pydantic import SecretStr

from stepfleet.orchestrator.agent import Agent
from stepfleet.orchestrator.async_batch import AsyncBatch
from stepfleet.orchestrator.batch_input import Given
from stepfleet.orchestrator.batch_lines import parse_input, parse_metadata
from stepfleet.orchestrator.batch_results import Pause
from stepfleet.orchestrator.batch_submission import BatchOrder
from stepfleet.orchestrator.batches import BatchProgress
from stepfleet.orchestrator.client import Client
from stepfleet.orchestrator.embedded import EmbeddedRedis
from stepfleet.orchestrator.embedded.folder import Folder
from stepfleet.orchestrator.errors import ConfigurationError, RunFailed
from stepfleet.orchestrator.overrides import stored_overrides
from stepfleet.orchestrator.overview import FleetOverview
from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.records.results import AgentRunResult, RunStatus
from stepfleet.orchestrator.run_control import CANCEL_NOTE
from stepfleet.orchestrator.settings import Settings, load_settings
from stepfleet.orchestrator.store.control import Answer
from stepfleet.orchestrator.store.fleet_facts import overview
from stepfleet.orchestrator.store.reading import StoredRun
from stepfleet.orchestrator.store.soundness import server_info, warnings
from stepfleet.orchestrator.store.submission import NewRun

__all__ = ["AsyncBatch", "AsyncFleet"]

DATA_FOLDER = Path(".stepfleet")
LONGEST_DELAY = 366 * 24 * 3600
Events = AsyncGenerator[dict[str, Any], None]
Input = str | Sequence[Message | Mapping[str, Any]]


class AsyncFleet:
    """A fleet as its client sees it. Connects at its first use, in the loop of that use.

    Without a Redis in the arguments, the environment or `stepfleet.toml` it joins the private
    server of the folder `.stepfleet`, where `stepfleet up` or `stepfleet run` has made one.
    `brings` names agents whose workers the caller starts: running workers need not have them.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        broker_url: str | None = None,
        settings: Settings | None = None,
        brings: Collection[str] = (),
    ) -> None:
        given = {"redis_url": redis_url, "broker_url": broker_url}
        self._settings = settings or load_settings(**given)
        self._brings = frozenset(brings)
        self._opening: asyncio.Task[Client] | None = None
        self._private: EmbeddedRedis | None = None

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Disconnect, and leave the private server if there is one."""
        opening, self._opening = self._opening, None
        if opening is not None:
            await asyncio.wait([opening])
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().aclose()
        private, self._private = self._private, None
        if private is not None:
            await asyncio.to_thread(private.stop)

    async def check(self) -> None:
        """Make sure that Redis answers and lets us in.

        Raises `StoreError` or `ConfigurationError` with the fix, within seconds.
        """
        client = await self._open()
        await client.store.connection.execute("PING")

    async def warnings(self) -> list[str]:
        """Return what about the Redis server endangers runs, each with its fix."""
        return warnings(await server_info((await self._open()).store.connection))

    async def overview(self) -> FleetOverview:
        """Return what is going on: active runs, waiting messages, workers."""
        return await overview((await self._open()).store)

    async def submit(
        self,
        agent: Agent | str,
        input: Input,  # noqa: A002 - the public name
        *,
        run_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        delay: float = 0.0,
        **overrides: Any,
    ) -> str:
        """Submit one run and return its id; workers take it up after `delay` seconds.

        `overrides` are fields of the agent's configuration for this run. Submitting a `run_id`
        (UUID) again changes nothing. Raises `ConfigurationError` that names field and fix.
        """
        client = await self._open()
        config = await client.config_of(agent)
        own = stored_overrides(config, overrides)
        run = NewRun(
            run_id=_checked_id(run_id),
            agent=config.name,
            config=config.digest,
            messages=_messages(input),
            max_steps=config.with_overrides(own).max_steps,
            overrides=own,
            metadata=parse_metadata(dict(metadata) if metadata else None),
            delay=_checked_delay(delay),
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

    async def run(self, agent: Agent | str, prompt: str, **options: Any) -> str:
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

    async def show(self, run_id: str) -> StoredRun:
        """Return all that is stored of a run. Raises `ConfigurationError` if there is none."""
        return await (await self._open()).runs.get(run_id)

    async def result(self, run_id: str) -> AgentRunResult:
        """Return a run's result, as far as it has come."""
        return (await self.show(run_id)).result()

    async def wait(
        self,
        run_id: str,
        timeout: float | None = None,  # noqa: ASYNC109 - the run goes on behind it
    ) -> AgentRunResult:
        """Return a run's result when it has ended; `TimeoutError` after `timeout` seconds."""
        client = await self._open()
        await client.runs.get(run_id)
        async with asyncio.timeout(timeout):
            pause = Pause()
            while True:
                (status,) = await client.batches.statuses([run_id])
                if status is None or status.is_terminal:
                    return await self.result(run_id)
                await pause.wait(idle=True)

    async def events(self, run_id: str, *, follow: bool = False) -> Events:
        """Yield a run's events in order; with `follow`, new ones until the run has ended."""
        client = await self._open()
        await client.runs.get(run_id)
        after = "0"
        pause = Pause()
        while True:
            (status,) = await client.batches.statuses([run_id])
            told, after = await client.runs.events(run_id, after)
            for event in told:
                yield event
            if not told:
                if not follow or status is None or status.is_terminal:
                    return
                await pause.wait(idle=True)

    async def cancel(self, run_id: str, note: str = CANCEL_NOTE) -> Answer:
        """Cancel a run; a step under way is broken off at once."""
        return await (await self._open()).control.cancel(run_id, note)

    async def pause(self, run_id: str) -> Answer:
        """Pause a run at its next step boundary."""
        return await (await self._open()).control.pause(run_id)

    async def resume(self, run_id: str) -> Answer:
        """Take a pause back."""
        return await (await self._open()).control.resume(run_id)

    async def retry(self, run_id: str, **overrides: Any) -> Answer:
        """Take an ended run up again at its failed step; what went well is kept.

        `overrides` change its configuration, as `max_steps=20`. Raises `ConfigurationError`
        when it completed, or when a limit that it has reached would end it at once again.
        """
        return await (await self._open()).control.retry(run_id, overrides)

    async def send(self, run_id: str, text: str, **overrides: Any) -> Answer:
        """Give an ended run a further user message; it goes on with its whole conversation.

        Limits, counters and clocks start anew; the session's totals stay. `overrides` change
        its configuration from here on. Raises `ConfigurationError` for an unknown run and for
        one that has not ended.
        """
        return await (await self._open()).control.send(run_id, text, overrides)

    async def _open(self) -> Client:
        if self._opening is None or (self._opening.done() and self._opening.exception()):
            self._opening = asyncio.create_task(self._connect())
        return await asyncio.shield(self._opening)

    async def _connect(self) -> Client:
        settings = self._settings
        if settings.redis_url is None:
            self._private = await asyncio.to_thread(_private_server)
        if self._private is None:
            return await Client.open(settings, self._brings)
        url = SecretStr(self._private.url)
        try:
            found = settings.model_copy(update={"redis_url": url})
            return await Client.open(found, self._brings)
        except BaseException:
            private, self._private = self._private, None
            await asyncio.to_thread(private.stop)
            raise


def _private_server() -> EmbeddedRedis | None:
    if not Folder(DATA_FOLDER.absolute()).has_data:
        return None
    return EmbeddedRedis.start(DATA_FOLDER)


def _messages(given: Input) -> tuple[Message, ...]:
    if isinstance(given, str):
        return parse_input(given, "input")
    plain = [
        one.model_dump(mode="json", exclude_defaults=True) if isinstance(one, Message) else one
        for one in given
    ]
    return parse_input(plain, "input")


def _checked_id(run_id: str | None) -> str:
    if run_id is None:
        return str(uuid4())
    try:
        return str(UUID(run_id))
    except ValueError:
        raise ConfigurationError(f"run_id {run_id!r} is no UUID; use uuid.uuid4()") from None


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
