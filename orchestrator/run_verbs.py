"""What a client asks of one run by its id: read it, wait for it, steer it."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from stepfleet.orchestrator.fleet_connection import FleetConnection
from stepfleet.orchestrator.following import Steps
from stepfleet.orchestrator.records.results import AgentRunResult
from stepfleet.orchestrator.run_control import CANCEL_NOTE
from stepfleet.orchestrator.store.batch_requests import pause_fleet
from stepfleet.orchestrator.store.control import Answer
from stepfleet.orchestrator.store.reading import StoredRun
from stepfleet.orchestrator.watching import cancel_is_left

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
