"""Looks after runs that wait for the ends of others: follows those, and lets the run begin.

What a dead worker has done of it is done again, with the same effect.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.batches.files.lines import input_of
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.protocol.fold import Before, answer_text, composed
from stepfleet.orchestrator.protocol.guards import dependency_outcome
from stepfleet.orchestrator.records.batch import is_stalled
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.state import AgentState, Lifecycle
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.codec import Fields
from stepfleet.orchestrator.store.compression import unpacked
from stepfleet.orchestrator.store.runs.links import (
    ENDED,
    FULL,
    GONE,
    PAGE,
    Dependent,
)
from stepfleet.orchestrator.store.runs.steps import ending
from stepfleet.orchestrator.store.store import Store

LOOK_AGAIN = 3600.0
"""Seconds after which a run is looked at that waits still: the end of another may be lost."""
MOST_LOOKS = 20
"""Others may change the run meanwhile; then the rescuer has it looked at again."""
SOON = 2.0
"""The same where a run of its batch is still to be created."""
CROWDED = 30.0
"""The same where more runs wait for one than its end is sent to, or a submitter has died."""
_ACTIVE = frozenset({Lifecycle.QUEUED, Lifecycle.IN_PROGRESS})
_FIELDS = ("status", "slim", "line", "stop_reason", "error")


class DependentRuns:
    """Lets runs begin when the runs before them have ended."""

    def __init__(self, opened: Store) -> None:
        self._opened = opened
        self._batches = opened.batches
        self.waiting = opened.dependents

    async def attend(self, run_id: str) -> None:
        """Follow what a run waits for; let it begin, or end, where all of them have ended.

        Raises `StoreError` when Redis stays out of reach; the rescuer then has it done again.
        """
        for _ in range(MOST_LOOKS):
            dependent = await self.waiting.read(run_id)
            if dependent is None or Lifecycle(dependent.header["status"]) not in _ACTIVE:
                return
            seconds = await self._follow(dependent, dependent.open)
            if not await self.waiting.wait(dependent, seconds):
                return
            if await self._go_on(dependent):
                return

    async def _follow(self, dependent: Dependent, runs: Sequence[str]) -> float:
        """Follow runs; return after how many seconds to look again, whatever comes."""
        replies = dict(zip(runs, await self.waiting.follow(dependent, runs), strict=True))
        gone = [run for run, reply in replies.items() if reply == GONE]
        if gone and (seconds := await self._until_created(dependent, gone)):
            return seconds
        for run, reply in replies.items():
            if reply in (ENDED, GONE):
                await self.waiting.arrived(dependent.run_id, run, dependent.header["agent"])
        return CROWDED if FULL in replies.values() else LOOK_AGAIN

    async def _until_created(self, dependent: Dependent, gone: Sequence[str]) -> float:
        """Return after how many seconds to look for runs that are still to be created, if any.

        A submitter that has died is followed by another one, perhaps hours later, but not for runs
        that are none of this batch.
        """
        batch = dependent.header.get("batch", "")
        manifest = await self._batches.find(batch) if batch else None
        if manifest is None or manifest.sealed or manifest.cancel_requested:
            return 0.0
        if not is_stalled(manifest, await self._batches.now()):
            return SOON
        above = range(int(dependent.header.get("row") or 0))
        there = await asyncio.to_thread(lambda: {run_id_of(batch, row) for row in above})
        return 0.0 if there.isdisjoint(gone) else CROWDED

    async def _go_on(self, dependent: Dependent) -> bool:
        """Let a run begin or end; return false where it is to be looked at once more."""
        names = dependent.after.runs
        found = await self._read(dependent.after.ids)
        active = [run for run, one in found.items() if one is None]
        for run in active:  # it was retried meanwhile: its new end counts
            await self.waiting.wait_again(dependent, run)
        if active:
            return False
        before = {name: one for name, run in names.items() if (one := found[run]) is not None}
        bad = next((name for name, one in before.items() if one.text is None), None)
        if bad is not None and dependent.after.failed == "stop":
            why = f"dependency_failed: run {names[bad]}: {before[bad].error}"
            return await self.waiting.end(dependent, self._ending(why))
        try:
            messages = await self._messages(dependent, before)
        except ConfigurationError as error:
            why = f"dependency_failed: the input cannot be made of the results: {error.message}"
            return await self.waiting.end(dependent, self._ending(why))
        return await self.waiting.begin(dependent, messages)

    def _ending(self, why: str) -> dict[str, Any]:
        retention = self._opened.settings.retention
        outcome = dependency_outcome(why).to_json()
        return {"outcome": outcome, **ending(StopReason.ERROR, why, retention)}

    async def _messages(
        self, dependent: Dependent, before: dict[str, Before]
    ) -> tuple[Message, ...]:
        given, text = await self.waiting.input_of(dependent.run_id), dependent.after.text
        if text is None:
            return given
        config: AgentConfig = await self._opened.configs.of_run(dependent.header)
        others = {name: one.text or one.error or "" for name, one in before.items()}
        worded = await asyncio.to_thread(composed, text, list(before.values()), others)
        # What was sent to it before it began follows.
        return (*input_of(worded, "input", config.prompt), *given[1:])

    async def _read(self, runs: Sequence[str]) -> dict[str, Before | None]:
        """Return the results of runs; None for one that is active."""
        found: dict[str, Before | None] = {}
        for at in range(0, len(runs), PAGE):
            page = runs[at : at + PAGE]
            headers = await self._opened.runs.headers(page, _FIELDS)
            for run, header in zip(page, headers, strict=True):
                found[run] = await asyncio.to_thread(_before, run, header)
        return found


def _before(run: str, header: Fields) -> Before | None:
    if not header:
        return Before(run, None, "it was removed, or is past its retention")
    status = Lifecycle(header["status"])
    if not status.is_terminal:
        return None
    name = header.get("line") or run
    if status is not Lifecycle.COMPLETED:
        why = f": {header['error'][:2_000]}" if header.get("error") else ""
        return Before(name, None, f"it ended as {header.get('stop_reason')}{why}")
    state = AgentState.from_json(unpacked(header["slim"]))
    structured = state.answer.structured if state.answer else None
    return Before(name, answer_text(state.last_output, structured))
