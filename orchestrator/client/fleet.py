"""The client of a fleet: submit runs and batches, read results, steer runs.

One implementation, asynchronous; `blocking.Fleet` is a facade over it. Makes no model call and
runs no tool: workers do.
"""

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self, Unpack, overload

from celery import Celery

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.config import RunOverrides, stored_overrides
from stepfleet.orchestrator.batches.files.lines import one_of
from stepfleet.orchestrator.batches.files.source import Given
from stepfleet.orchestrator.client.approvals import AsyncFleetApprovals, DecideOptions
from stepfleet.orchestrator.client.archive import AsyncFleetArchive
from stepfleet.orchestrator.client.audit import Which, acting_for, changes, checked_user, entries_of
from stepfleet.orchestrator.client.batch import (
    AsyncBatch,
    AsyncFleetBatches,
    batch_made,
    submission_of,
)
from stepfleet.orchestrator.client.costs import CostOptions, check_calls, costs_of, lines_of_runs
from stepfleet.orchestrator.client.history import AsyncFleetHistory
from stepfleet.orchestrator.client.inputs import (
    BatchOptions,
    Input,
    RunOptions,
    SubmitOptions,
    batch_submission,
    checked_id,
    messages_of,
    origin_of,
    run_submission,
    time_given,
)
from stepfleet.orchestrator.client.limits import AsyncFleetCache, AsyncFleetLimits
from stepfleet.orchestrator.client.local import (
    DebugOrder,
    DebugSteps,
    LocalFleet,
    is_run_id,
    private_fleet,
    stepped,
)
from stepfleet.orchestrator.client.runs import AsyncFleetRuns
from stepfleet.orchestrator.client.schedules import AsyncFleetSchedules
from stepfleet.orchestrator.client.session import DATA_FOLDER, FleetSession
from stepfleet.orchestrator.client.watching.follow import Steps
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.support import check_messages
from stepfleet.orchestrator.records.audit import AuditEntry
from stepfleet.orchestrator.records.calls.answers import Decided
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.ledger import CostLine, Costs
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.settings.own_app import app_settings
from stepfleet.orchestrator.settings.settings import Settings, load_settings
from stepfleet.orchestrator.store.fleet.overview import FleetOverview, overview
from stepfleet.orchestrator.store.fleet.scale import ScaleSignal, scale_signal
from stepfleet.orchestrator.store.fleet.servers import server_info, warnings
from stepfleet.orchestrator.store.runs.submission import NewRun
from stepfleet.orchestrator.store.store import Store

__all__ = ["AsyncBatch", "AsyncFleet"]

RaiseOn = Literal["not_completed", "never"]
"""When `run` raises: for every run that did not complete, or for none."""


class AsyncFleet:
    """A fleet as its client sees it. Connects at its first use, in the loop of that use.

    Without a Redis in the arguments, the environment or `stepfleet.toml` it joins the private
    server of the folder `.stepfleet`, where `stepfleet up` or `stepfleet run` has made one.
    `brings` names agents whose workers the caller starts: running workers need not have them.
    `app` is your own Celery app, on whose workers `stepfleet.worker.install` lets steps run.
    `user` names who acts in the audit, by default `STEPFLEET_USER` or the system's user.
    """

    runs: AsyncFleetRuns
    """Existing runs: read, follow, control, remove."""
    batches: AsyncFleetBatches
    """Submitted batches."""
    history: AsyncFleetHistory
    """The past of runs: checkpoints, forks, comparisons, costs, tool calls."""
    cache: AsyncFleetCache
    """The response cache."""
    limits: AsyncFleetLimits
    """Limits that all workers share."""
    archive: AsyncFleetArchive
    """Ended runs that were moved to files."""
    settings: Settings
    """The settings that it was made with."""

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        broker_url: str | None = None,
        settings: Settings | None = None,
        brings: Collection[str] = (),
        app: Celery | None = None,
        user: str | None = None,
    ) -> None:
        given = {"redis_url": redis_url, "broker_url": broker_url, "user": user}
        found = settings or (load_settings(**given) if app is None else app_settings(app, **given))
        if settings and user:
            found = settings.model_copy(update={"user": checked_user(user)})
        self._use(FleetSession(found, brings, app=app))

    @classmethod
    def local(
        cls, agents: Iterable[Agent], *, folder: str | Path | None = DATA_FOLDER
    ) -> "AsyncFleet":
        """Return a local fleet: a private server, and a worker in a thread of this process.

        For development, without any set-up: `with Fleet.local(agents=[clerk]) as fleet`, or
        `async with AsyncFleet.local(...)`. Runs are kept in `folder`, which commands in this
        directory find too; None is a temporary one. The worker also does open runs of its agents
        that it finds there, and hands back what is open at the end. Tools have no time limits:
        `breakpoint()` works in them. At the first use raises `ConfigurationError` that names the
        extra `local` where it is missing.
        """
        agents = tuple(agents)
        made = cls.__new__(cls)
        settings = load_settings().model_copy(update={"redis_url": None, "broker_url": None})
        names = [agent.name for agent in agents]
        made._use(FleetSession(settings, names, local=LocalFleet(agents, folder)))  # noqa: SLF001 - its own
        return made

    def _use(self, session: FleetSession) -> None:
        self._session = session
        self.settings = session.settings
        self.runs = AsyncFleetRuns(self._session)
        self.batches = AsyncFleetBatches(self._session)
        self.history = AsyncFleetHistory(self._session)
        self.cache = AsyncFleetCache(self._session)
        self.limits = AsyncFleetLimits(self._session)
        self.approvals = AsyncFleetApprovals(self._session)
        self.schedules = AsyncFleetSchedules(self._session)
        self.archive = AsyncFleetArchive(self._session)

    async def __aenter__(self) -> Self:
        await self._session.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Disconnect, and leave the private server if there is one."""
        await self._session.aclose()

    def forget(self) -> object:
        """Leave the connection to the process that made it, and return it; for a forked child."""
        return self._session.forget()

    async def check(self) -> None:
        """Check that Redis is reachable and accepts our credentials.

        Raises `StoreError` or `ConfigurationError` with the fix, within seconds.
        """
        store = await self._session.store()
        await store.connection.execute("PING")

    async def warnings(self) -> list[str]:
        """Return warnings about the Redis server, each with its fix."""
        store = await self._session.store()
        return warnings(await server_info(store.connection))

    async def overview(self) -> FleetOverview:
        """Return the state of the fleet: active runs, waiting messages, workers."""
        return await overview(await self._session.store())

    async def scale(
        self, *, queue: str | None = None, slots_per_worker: int | None = None, beside: int = 0
    ) -> ScaleSignal:
        """Return how many workers there should be, of the queue of steps or of tools.

        A new worker has `slots_per_worker`; None: as many as those alive. `beside` workers are
        there whatever is wanted, and not counted in `wanted`. Raises `ConfigurationError` for an
        empty queue, less than one slot, and less than none beside.
        """
        store = await self._session.store()
        return await scale_signal(store, queue, slots_per_worker=slots_per_worker, beside=beside)

    @changes("pause", "fleet")
    async def pause(self) -> None:
        """Pause the fleet: no step begins on any worker, and no tool of a step under way."""
        await (await self._session.store()).requests.pause_fleet(paused=True)

    @changes("resume", "fleet")
    async def resume(self) -> None:
        """End the fleet's pause."""
        await (await self._session.store()).requests.pause_fleet(paused=False)

    @staticmethod
    def acting_for(user: str) -> AbstractContextManager[None]:
        """Name whom actions in a `with` block are for: a web server acts for its users.

        They are the `user` of its entries in the audit, and decide calls that wait. Holds for this
        task or thread and what it starts. Raises `ConfigurationError`.
        """
        return acting_for(user)

    async def audit(
        self,
        *,
        limit: int = 100,
        since: datetime | str | None = None,
        user: str | None = None,
        action: str | None = None,
        follow: bool = False,
    ) -> AsyncGenerator[AuditEntry, None]:
        """Yield who changed what: the newest `limit` entries that match, the oldest of them first.

        `since` is a time, in UTC where it has no zone. With `follow` it goes on with those that
        come. The newest 10,000 entries are kept. Raises `ConfigurationError`.
        """
        store = await self._session.store()
        which = Which(limit, time_given("since", since), user, action)
        async for entry in entries_of(store, which, follow=follow):
            yield entry

    async def decide(self, run_id: str | None = None, **options: Unpack[DecideOptions]) -> Decided:
        """Approve, deny or answer calls that wait for a person (see `fleet.approvals`).

        Those of a run, or all that conditions as `tool="refund", batch=ID` hold for. The first
        decision of a call counts. Raises `ConfigurationError` where nothing of the run waits, or
        the answer is none of a question's choices.
        """
        return await self.approvals.decide(run_id, **options)

    async def submit(
        self,
        agent: Agent | str,
        input: Input,  # noqa: A002 - the public name
        **options: Unpack[SubmitOptions],
    ) -> str:
        """Submit one run and return its id; workers start it after `delay` seconds.

        `input` is text, a conversation, another run's result, whose answer becomes the prompt, or
        a dict, worded by the agent's `prompt` (JSON without one).
        `parent` is the id of the run that this one works for. `tenant` names who it is for, as
        costs and limits count it; without one, that of the parent. Where runs wait for a limit,
        those of a higher `priority` go first. `limit` has its budgets, such as `{"usd": 0.5}`.
        With `after` it begins when those runs (ids, or a dict of ids by names) have ended; its text
        may have their results, such as `{output}`. If one failed, so does it, unless
        `after_failed="run"` lets it begin. Other options override fields of the agent's
        configuration for this run. Submitting a `run_id` (UUID), or an `idempotency_key` (text),
        again changes nothing; of another input it is a `ConflictError`. Raises
        `ConfigurationError` with field and fix.
        """
        given = run_submission(agent, input, options)
        client = await self._session.open()
        config = await client.config_of(agent)
        own, tenant = stored_overrides(config, given.overrides), given.tenant
        if given.parent and not tenant:
            tenant = await client.store.runs.tenant(given.parent)
        changed, messages = config.with_overrides(own), messages_of(input, config.prompt)
        check_messages(changed.models, messages, "input")
        if given.after:
            await client.store.batches.ensure_runs(given.after.ids)
            messages = messages_of(input) if given.after.text else messages
        run = NewRun(
            run_id=checked_id(given.run_id),
            agent=config.name,
            config=config.digest,
            messages=messages,
            max_steps=changed.max_steps,
            model=changed.model,
            overrides=own,
            metadata=given.metadata,
            parent=given.parent,
            tenant=tenant,
            priority=given.priority,
            delay=given.delay,
            limited=given.limit is not None,
            origin=origin_of(input),
            after=given.after,
            is_named=given.run_id is not None,
        )
        await client.store.submission.require_room()
        await client.accept([config])
        await client.store.configs.save(config)
        if given.limit:
            await self.limits.submitted(run.run_id, given.limit)
        if await client.store.submission.create(run):
            await client.store.submission.publish([run])
        return run.run_id

    async def run_with_steps(
        self,
        agent: Agent | str,
        input: Input,  # noqa: A002 - the public name
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the run goes on after it
        **options: Unpack[SubmitOptions],
    ) -> AgentRunResult:
        """Submit one run, wait for its end and return its result, however it ended.

        `options` are those of `submit`. Raises `TimeoutError` after `timeout` seconds.
        """
        return await self.runs.wait(await self.submit(agent, input, **options), timeout)

    @overload
    async def run(
        self,
        agent: Agent | str,
        prompt: Input,
        *,
        raise_on: Literal["not_completed"] = ...,
        **options: Unpack[RunOptions],
    ) -> str: ...

    @overload
    async def run(
        self,
        agent: Agent | str,
        prompt: Input,
        *,
        raise_on: Literal["never"],
        **options: Unpack[RunOptions],
    ) -> AgentRunResult: ...

    async def run(
        self,
        agent: Agent | str,
        prompt: Input,
        *,
        raise_on: RaiseOn = "not_completed",
        **options: Unpack[RunOptions],
    ) -> str | AgentRunResult:
        """Submit one run, wait for its end and return its text.

        Raises `MaxStepsExceeded` where a limit stopped it, and `RunFailed` where it ended in error
        or was cancelled, each with the result. With `raise_on="never"` it returns the result
        itself, however the run ended. `options` are those of `submit`, and a `timeout` in seconds,
        after which it raises `TimeoutError`.
        """
        one_of(raise_on, "raise_on", RaiseOn)
        return _answer_of(await self.run_with_steps(agent, prompt, **options), raise_on)

    @overload
    async def run_with_messages(
        self,
        agent: Agent | str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        raise_on: Literal["not_completed"] = ...,
        **options: Unpack[RunOptions],
    ) -> str: ...

    @overload
    async def run_with_messages(
        self,
        agent: Agent | str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        raise_on: Literal["never"],
        **options: Unpack[RunOptions],
    ) -> AgentRunResult: ...

    async def run_with_messages(
        self,
        agent: Agent | str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        raise_on: RaiseOn = "not_completed",
        **options: Unpack[RunOptions],
    ) -> str | AgentRunResult:
        """Do the same as `run`, with a conversation instead of a prompt."""
        one_of(raise_on, "raise_on", RaiseOn)
        return _answer_of(await self.run_with_steps(agent, messages, **options), raise_on)

    async def run_stream(
        self, agent: Agent | str, prompt: Input, **options: Unpack[SubmitOptions]
    ) -> Steps:
        """Submit one run and yield its steps as they are committed, until it has ended."""
        async for step in self.runs.steps(await self.submit(agent, prompt, **options)):
            yield step

    async def debug(
        self,
        given: Input,
        agent: Agent | None = None,
        *,
        at: int = 0,
        **overrides: Unpack[RunOverrides],
    ) -> DebugSteps:
        """Execute a run here, step by step: each step is done when it is taken.

        `given` is an input as that of `submit`, or the id of a run: then a copy of it goes on after
        its first `at` steps, with `agent` as it is now, and the run stays as it is. Model calls
        and tools are real. They are executed in the calling thread and on a private server
        that is removed at the end: `breakpoint()` works in tools, and neither leases nor limits of
        time end a person's session. `agent` may be left out in a local fleet with one agent.
        Raises `ConfigurationError` with the fix.
        """
        order = await self._debugged(given, agent, at)
        async for step in debugged(self.settings, order, overrides):
            yield step

    async def _debugged(self, given: Input, agent: Agent | None, at: int) -> DebugOrder:
        """Return what is debugged: read here, executed anywhere."""
        agent = agent or (self._session.local.only_agent() if self._session.local else None)
        if agent is None:
            msg = "debug() executes the agent's code here: pass agent=..., the Agent itself"
            raise ConfigurationError(msg)
        if not is_run_id(given):
            return DebugOrder(agent, given)
        checkpoint = await self.history.checkpoint(str(given), at=at)
        return DebugOrder(agent, given, checkpoint)

    async def costs(
        self,
        by: str | Sequence[str] = (),
        **which: Unpack[CostOptions],
    ) -> Costs:
        """Return what model calls have cost, by day, tenant, batch, agent, model or status.

        `by` names several of these as a list, or with commas. Counted are the calls of whole days
        (UTC) from `since` to `until`, by default of all days that are kept (`ledger_days`), also
        those of runs that are gone; of one `tenant` ('' for runs without one), `batch`, `agent`,
        `model` or `status`, if given. Raises `ConfigurationError`.
        """
        return await costs_of(await self._session.store(), by, check_calls(which))

    async def cost_lines(
        self,
        run_id: str | None = None,
        **which: Unpack[CostOptions],
    ) -> AsyncGenerator[CostLine, None]:
        """Yield the single model calls of one run, of a batch, or of all runs that are kept.

        They come from the runs' own records, run by run: those of expired or purged runs are
        missing, and steps that a memory policy has removed from the log. Raises
        `ConfigurationError` for an unknown run.
        """
        store = await self._session.store()
        async for line in lines_of_runs(store, run_id, check_calls(which)):
            yield line

    @changes("submit", batch_made, submission_of)
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
        **options: Unpack[BatchOptions],
    ) -> AsyncBatch:
        """Submit a batch: a file, `-` for standard input, or dicts.

        Files are JSONL, CSV, TSV, Parquet or a JSON array, by their ending or `input_format`.
        Lines have `id`, `input` and optionally `agent`, `metadata`, `overrides` and `tenant`
        (`tenant=` is that of lines that name none), are OpenAI batch requests, or rows of your
        own: their agent's `prompt` words them, or `input_field` is sent; `id_field` is their id.
        With `only_new`, rows that the newest batch of this file (or of this `name`) and agent
        lacks are added to that batch. `limit` is what all its runs may take together: fields of a
        `Limit` (`in_flight`, `starts_per_minute`, ...); `fleet.limits.set("batch:ID", ...)`
        changes it later. Runs of a higher `priority` go first where some wait for a limit. Further
        options are overrides for all runs. `agent` is for lines that name none; `agents` are
        further ones as code, others are those of workers. All lines are checked before any becomes
        a run; `skip_invalid` submits the good ones anyway. The same lines, agents and overrides, or
        the same `idempotency_key`, are the same batch: submitting again completes an interrupted
        submission. Memory here is the same for any number of lines. `on_progress` receives the
        number of runs so far. Raises `ConfigurationError` that lists the bad lines, `StoreError`
        when Redis stays out of reach.
        """
        given: dict[str, Any] = {"name": name, "skip_invalid": skip_invalid}
        given |= {"idempotency_key": idempotency_key, "on_progress": on_progress}
        submission = batch_submission(source, agent, options, agents, **given)
        client = await self._session.open()
        done = await client.batch_submission.submit(submission, client.accept)
        return AsyncBatch(
            self._session, done.manifest, done.problems, is_new=done.is_new, added=done.added
        )


async def debugged(settings: Settings, order: DebugOrder, overrides: RunOverrides) -> DebugSteps:
    """Yield the steps of a debugged run; `order` is what `debug` was given."""
    own: RunOverrides = {"time_limit": None, "cumulative_timeout": None, **overrides}
    async with private_fleet(settings) as found:

        async def submit() -> str:
            async with AsyncFleet(settings=found, brings=[order.agent.name]) as fleet:
                if order.checkpoint is None:
                    return await fleet.submit(order.agent, order.given, **own)
                return await fleet.history.restore(order.checkpoint, order.agent, **own)

        steps = stepped(found, [order.agent], submit)
        try:
            async for step in steps:
                yield step
        finally:
            await steps.aclose()


def _answer_of(result: AgentRunResult, raise_on: RaiseOn) -> str | AgentRunResult:
    if raise_on == "never":
        return result
    return result.raise_for_status().output or ""


async def store_of(fleet: AsyncFleet) -> Store:
    """Return the open store of a fleet: for the dashboard, no part of the public client.

    Raises `StoreError` or `ConfigurationError` where it cannot be opened.
    """
    return await fleet._session.store()  # noqa: SLF001 - its own
