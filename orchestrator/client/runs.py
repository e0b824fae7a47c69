"""What a client asks of one run by its id: read it, wait for it, steer it."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from stepfleet.orchestrator.client.checkpoints.capture import cost_calls
from stepfleet.orchestrator.client.control import CANCEL_NOTE
from stepfleet.orchestrator.client.follow import Steps
from stepfleet.orchestrator.client.rendering import (
    LiveMessages,
    Recorded,
    RunView,
    UIMessage,
    rendered,
    view_of,
)
from stepfleet.orchestrator.client.session import FleetConnection
from stepfleet.orchestrator.client.watch import cancel_is_left
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.caching.statistics import CacheStatistics
from stepfleet.orchestrator.models.pricing.ledger import CostStatistics, ModelCall, statistics_of
from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.records.run.tool_traces import ToolTraces, tool_traces_of
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.settings.settings import LONGEST_SECONDS
from stepfleet.orchestrator.store.batches.requests import pause_fleet
from stepfleet.orchestrator.store.lua import run_script
from stepfleet.orchestrator.store.records.codec import MESSAGES
from stepfleet.orchestrator.store.response_cache import CacheEntries
from stepfleet.orchestrator.store.runs.control import Answer
from stepfleet.orchestrator.store.runs.marks import COST_FROM, mark
from stepfleet.orchestrator.store.runs.purge import Purge, Purging
from stepfleet.orchestrator.store.runs.reading import StoredRun


class FleetCache(FleetConnection):
    """Verbs on the response cache, which all workers of the fleet share."""

    async def cache_statistics(self) -> CacheStatistics:
        """Return the entries, their size in bytes, hits and misses, in all and by model."""
        return await (await self._entries()).statistics()

    async def clear_cache(self, *, key: str | None = None, model: str | None = None) -> int:
        """Drop one entry, those of one model, or all with the counters; return how many went.

        `key` is a step's `cache.key`, `model` as agents name it (`provider:name`). Calls that are
        under way may fill the cache again. Raises `ConfigurationError` for what is no key.
        """
        if key is not None and model is not None:
            raise ConfigurationError("key and model are two ways to choose; give one of them")
        entries = await self._entries()
        if key is not None:
            return await entries.drop(key)
        return await (entries.clear() if model is None else entries.drop_model(model))

    async def _entries(self) -> CacheEntries:
        store = (await self._open()).store
        return CacheEntries(store.connection, store.settings.cache_bytes)


ENDS = tuple(one.value for one in Lifecycle if one.is_terminal)


class FleetPurge(FleetConnection):
    """The verb that removes ended runs."""

    async def purge(
        self,
        *,
        batch: str | None = None,
        statuses: Sequence[str] = (),
        older_than: float = 0.0,
        dry_run: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> int:
        """Remove ended runs with all that is kept of them; return how many it was.

        Without conditions that is every ended run; `batch` takes those of one batch, `statuses`
        those of some end states (`completed`, `stopped`, ...), `older_than` those that ended so
        many seconds ago. A batch counts them on, as it does expired ones; one that is purged whole
        and has no open runs is forgotten. With `dry_run` nothing is removed. `on_progress` hears
        after each page how many it was so far. Works while Redis is full; open runs stay.
        Raises `ConfigurationError` for an unknown batch or state.
        """
        for status in statuses:
            if status not in ENDS:
                msg = f"no run ends as {status!r}; write one of {', '.join(ENDS)}"
                raise ConfigurationError(msg)
        if not 0 <= older_than <= LONGEST_SECONDS or math.isnan(older_than):
            msg = f"older_than is {older_than}; write seconds from 0 to {LONGEST_SECONDS:,}"
            raise ConfigurationError(msg)
        client = await self._open()
        if batch is not None:
            await client.batches.get(batch)
        store = client.store
        purging = Purging(store.connection, store.keys, client.batches)
        done = 0
        async for done in purging.purge(Purge(batch, tuple(statuses), older_than, dry_run)):
            if on_progress is not None:
                on_progress(done)
        return done


class RunCosts(FleetConnection):
    """Verbs on a run's costs, over all its sessions, also those before a checkpoint."""

    async def get_cost_calls(self, run_id: str) -> tuple[ModelCall, ...]:
        """Return a run's committed model calls with their costs in USD, since the last reset."""
        run = await (await self._open()).runs.get(run_id)
        first = max(int(run.header.get(COST_FROM, "0")) - run.first, 0)
        return tuple(cost_calls(run.config, [logged.result for logged in run.log[first:]]))

    async def get_cost_stats(self, run_id: str) -> CostStatistics:
        """Return the sums over those calls, in all and by model."""
        return statistics_of(await self.get_cost_calls(run_id))

    async def get_cost_summary(self, run_id: str) -> str:
        """Return the sums as text, a line per model."""
        told = await self.get_cost_stats(run_id)
        lines = [
            f"{told.total_calls} calls, {told.total_tokens:,} tokens, {told.total_cost:.6f} USD"
        ]
        for model, sums in sorted(told.by_model.items()):
            lines.append(
                f"  {model}: {sums.calls} calls, {sums.input_tokens:,} tokens in, "
                f"{sums.output_tokens:,} out, {sums.cost:.6f} USD"
            )
        return "\n".join(lines)

    async def reset_cost_tracking(self, run_id: str) -> None:
        """Let the statistics begin anew with the next step; the run's own totals stay.

        Raises `ConfigurationError` if there is no run of that id.
        """
        client = await self._open()
        _, done = await client.snapshots.standing(run_id)
        await mark(client.store.connection, client.store.keys, run_id, COST_FROM, done)


CLEARED = "traces_cleared"


class RunToolTraces(FleetConnection):
    """Verbs on the tool calls of runs."""

    async def tool_traces(self, run_id: str) -> ToolTraces:
        """Return the tool calls of a run's committed steps since they were last cleared.

        Raises `ConfigurationError` if there is no such run.
        """
        run = await (await self._open()).runs.get(run_id)
        cleared = int(run.header.get(CLEARED, "0"))
        return tool_traces_of((step.result for step in run.log), cleared)

    async def clear_tool_traces(self, run_id: str) -> int:
        """Leave the calls so far out of `tool_traces`; return how many the run has had.

        The run's log keeps them: results, conversation and retries are as before. Raises
        `ConfigurationError` if there is no such run.
        """
        client = await self._open()
        run = await client.runs.get(run_id)
        count = sum(len(step.result.tool_calls) for step in run.log)
        keys = client.store.keys.script_keys(run_id, None)
        await run_script(client.store.connection, "clear_traces", keys, run_id, CLEARED, count)
        return count


Events = AsyncGenerator[dict[str, Any], None]


class RunVerbs(FleetConnection):
    """Verbs on runs that exist."""

    async def show(self, run_id: str) -> StoredRun:
        """Return all that is stored of a run. Raises `ConfigurationError` if there is none.

        A cancel that a dead worker left undone takes effect first.
        """
        client = await self._open()
        run = await client.runs.get(run_id)
        left = run.header.get("want") == "cancel"
        if not (left and cancel_is_left(run.header, await client.runs.now())):
            return run
        await client.control.ask_cancel(run_id, run.header.get("want_note", ""))
        return await client.runs.get(run_id)

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
            await client.watch.ended(run_id)
            return await self.result(run_id)

    async def events(self, run_id: str, *, follow: bool = False) -> Events:
        """Yield a run's events in order; with `follow`, new ones until the run has ended."""
        client = await self._open()
        await client.runs.get(run_id)
        if follow:
            async for event in client.following.events(run_id):
                yield event
            return
        after = "0"
        while True:
            told, after = await client.runs.events(run_id, after)
            for event in told:
                yield event
            if not told:
                return

    async def stream(self, run_id: str, *, since: int = 0, chunks: bool = False) -> Events:
        """Yield a run's events behind number `since`, those to come too, until it has ended.

        With `chunks` also the text while it is written, where the run tells it
        (`broadcast="standard"`); `StreamedText` folds it.
        """
        client = await self._open()
        async for event in client.following.envelopes(run_id, since, chunks=chunks):
            yield event

    async def steps(self, run_id: str) -> Steps:
        """Yield a run's steps as they are committed, until it has ended."""
        async for step in (await self._open()).following.steps(run_id):
            yield step

    async def cancel(self, run_id: str, note: str = CANCEL_NOTE) -> Answer:
        """Cancel a run; a step under way is broken off at once.

        Answers `requested` where a worker holds the run. Should that worker be dead, with no other
        one up, whoever waits for the run or reads it behind the lease has it end.
        """
        return await (await self._open()).control.cancel(run_id, note)

    async def pause(self, run_id: str | None = None) -> Answer:
        """Pause a run before its next tool or step; without an id, the whole fleet.

        While the fleet is paused no step begins on any worker, and no tool of one under way.
        """
        client = await self._open()
        if run_id is not None:
            return await client.control.pause(run_id)
        await pause_fleet(client.store.connection, client.store.keys, paused=True)
        return Answer("paused")

    async def resume(self, run_id: str | None = None) -> Answer:
        """Take a pause back: a run's, or without an id the fleet's."""
        client = await self._open()
        if run_id is not None:
            return await client.control.resume(run_id)
        await pause_fleet(client.store.connection, client.store.keys, paused=False)
        return Answer("resumed")

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


_INPUT = "input:"
Windows = AsyncGenerator[tuple[UIMessage, ...], None]


class RunDisplay(RunVerbs):
    """Verbs for windows on runs."""

    async def view(self, run_id: str) -> RunView:
        """Return a run's history as a chat window shows it, with what it stopped for.

        Raises `ConfigurationError` if there is no such run.
        """
        run = await self.show(run_id)
        return view_of(run.result(), history_of(run))

    async def display(self, run_id: str, *, continuation: bool = False) -> Windows:
        """Yield all messages of a run's window at each change, until the run has ended.

        The last ones are its stored history, with the errors that came up. Text comes while it
        is written where the run tells it (`broadcast="standard"`); `continuation` shows why the
        run stopped where it tells that. Raises `ConfigurationError` if there is no such run.
        """
        run = await self.show(run_id)
        attempts = run.config.model_attempts
        window = LiveMessages(run_id, attempts=attempts, continuation=continuation)
        async for event in self.events(run_id):
            window.add(event)
        shown = window.reconcile(history_of(await self.show(run_id)))
        yield shown
        async for event in self.stream(run_id, since=window.sequence, chunks=True):
            if window.add(event) and window.messages != shown:
                shown = window.messages
                yield shown
        whole = window.reconcile(history_of(await self.show(run_id)))
        if whole != shown:
            yield whole


def inputs_of(run: StoredRun) -> dict[int, tuple[Message, ...]]:
    """Return what a stored run was given, by the number of steps that it had done by then."""
    return {
        int(name.removeprefix(_INPUT)): MESSAGES.validate_json(given)
        for name, given in run.fields.items()
        if name.startswith(_INPUT)
    }


def history_of(run: StoredRun) -> tuple[UIMessage, ...]:
    """Return the history of a stored run."""
    recorded = Recorded(
        run_id=run.run_id,
        started_at=run.state.info.started_at,
        inputs=inputs_of(run),
        log=run.log,
    )
    return rendered(recorded)
