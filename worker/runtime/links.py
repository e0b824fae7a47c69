"""What runs owe each other: ends, to the calls and runs that wait for them, and requests.

Sends both, and lets a run begin when those that it waits for have ended. What a dead worker has
done of it is done again, with the same effect.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import to_jsonable_python

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.batches.files.lines import input_of
from stepfleet.orchestrator.client.control import RunControl
from stepfleet.orchestrator.errors import (
    AgentException,
    ConfigurationError,
    SerializationError,
    StoreError,
)
from stepfleet.orchestrator.protocol.claim import Want, Work
from stepfleet.orchestrator.protocol.fold import Before, answer_text, composed
from stepfleet.orchestrator.protocol.guards import dependency_outcome
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.batch import is_stalled
from stepfleet.orchestrator.records.calls.answers import LONGEST_OUTPUT, Answer, RunEnd
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run.results import AgentRunResult, RunStatus
from stepfleet.orchestrator.records.state import AgentState, Lifecycle
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.codec import Fields, reading
from stepfleet.orchestrator.store.compression import unpacked
from stepfleet.orchestrator.store.dispatch import client_app
from stepfleet.orchestrator.store.pace import in_groups
from stepfleet.orchestrator.store.runs.control import ControlOutcome, ControlResult
from stepfleet.orchestrator.store.runs.links import (
    BEGINNING,
    ENDED,
    FULL,
    GONE,
    RUNS_AT_ONCE,
    Dependent,
    Owed,
)
from stepfleet.orchestrator.store.runs.steps import ending
from stepfleet.orchestrator.store.store import Store

log = logging.getLogger(__name__)

_LONGEST_ERROR = 2_000
_CALLER = ("agent", "config", "overrides")
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


class LinkedRuns:
    """Settles what runs owe to others."""

    def __init__(self, opened: Store) -> None:
        self._opened = opened
        self._links, self._runs = opened.links, opened.runs
        self._control = opened.control
        self.dependents = DependentRuns(opened)
        self.control = RunControl(opened, client_app(opened.settings))

    async def settle(self, run_id: str) -> None:
        """Send the run's end, and the request to it, to whom they concern.

        Raises `StoreError` when Redis stays out of reach; the rescuer then has it done again.
        """
        while True:
            owed = await self._links.owed(run_id)
            if owed.request and not await self._pass_on(run_id, owed, owed.request):
                owed = replace(owed, request=None)  # the rescuer has it done again
            if owed.calls:
                self._opened.crash("end-owed")
                await self._answer(run_id, owed.calls)
                self._opened.crash("end-sent")
            left = await self._links.settled(run_id, owed)
            if not owed.calls or not left:
                return

    async def _answer(self, run_id: str, calls: Sequence[Work]) -> None:
        keys, execute = self._opened.keys, self._opened.connection.execute_all
        # What a call waits for is this run's id: of one that it started, and of one before it.
        headers = await execute(*(("HMGET", keys.run(one.run_id), *_CALLER) for one in calls))
        pairs = [
            (call, {name: one for name, one in zip(_CALLER, header, strict=True) if one})
            for call, header in zip(calls, headers, strict=True)
        ]
        begin = self.dependents.waiting.arrived
        beginning = [pair for pair in pairs if pair[0].index == BEGINNING]
        await in_groups(
            beginning, lambda pair: begin(pair[0].run_id, run_id, pair[1].get("agent", ""))
        )
        if waiting := [pair for pair in pairs if pair[0].index != BEGINNING]:
            result = (await self._runs.get(run_id)).result()
            if not result.stop_reason:
                return  # it was retried meanwhile, and will end again
            if await self._goes_on_with(waiting[0][0], result):
                return
            await in_groups(waiting, lambda pair: self._answer_to(*pair, result))

    async def _goes_on_with(self, call: Work, result: AgentRunResult) -> bool:
        """Retry a run that was cancelled with its caller where that waits for it again.

        Its end is none that the call is to be answered with: the caller was retried since.
        """
        child, caller = result.run_id, call.run_id
        if result.status != RunStatus.CANCELLED or not await self._waits_for(child, caller):
            return False
        note = await self._opened.connection.execute(
            "HGET", self._opened.keys.run(child), "want_note"
        )
        if note != _ended_note(caller):
            return False
        try:
            await self.control.retry(child, {})
        except StoreError:
            raise
        except AgentException:  # it would end at once again: that is the answer
            newest = (await self._runs.get(child)).result()
            return newest.status != RunStatus.CANCELLED  # another one has retried it meanwhile
        if not await self._waits_for(child, caller):  # it has ended since, and did not see this
            await self.cancel(child, caller)
        return True

    async def _waits_for(self, child: str, caller: str) -> bool:
        status, token = await self._opened.connection.execute(
            "HMGET", self._opened.keys.run(caller), "status", "token"
        )
        if status is None or Lifecycle(status).is_terminal or token:
            return False
        return child in await self._links.awaited(caller)

    async def _answer_to(
        self, call: Work, caller: Mapping[str, str], result: AgentRunResult
    ) -> None:
        if not caller:
            return  # it was deleted
        try:
            most = (await self._opened.configs.of_run(caller)).sub_agent_limits.output
        except SerializationError:  # of another version, which reads on as it can
            most = LONGEST_OUTPUT
        answer = Answer(run=run_end(result, most))
        await self._opened.calls.answer(call, result.run_id, answer, caller["agent"])

    async def _pass_on(self, run_id: str, owed: Owed, request: Want) -> bool:
        """Pass a request on; return false where a worker may be starting one of these runs."""
        pass_on = self._cancel if request is Want.CANCEL else self._pause
        done = await in_groups(owed.runs, lambda child: pass_on(child, run_id))
        found = list(zip(owed.runs, done, strict=True))
        if held := [child for child, one in found if one.in_hands and request is Want.CANCEL]:
            await self.control.interrupt(held)
        at_rest = (ControlOutcome.CANCELLED, ControlOutcome.PAUSED)
        # Those that nobody holds may have runs below them: no other worker need find these.
        await in_groups([child for child, one in found if one.outcome in at_rest], self.settle)
        missed = [child for child, one in found if one.outcome is ControlOutcome.UNKNOWN]
        return not missed or (await self._links.begun(run_id)).isdisjoint(missed)

    async def pause(self, child: str, run_id: str) -> None:
        """Pause a run with the one that has started it, and which it goes on with."""
        await self._pause(child, run_id)

    async def _pause(self, child: str, run_id: str) -> ControlResult:
        return await self._control.pause(child, paused_with=run_id)

    async def stop(self, child: str, run_id: str) -> RunEnd | None:
        """Cancel a run that its starter `run_id` waits for no longer; return what is known of it.

        That is None where it was never there, or cannot be read here.
        """
        await self.cancel(child, run_id)
        try:
            result = (await self._runs.get(child)).result()
        except (ConfigurationError, SerializationError):
            return None
        end = run_end(result).model_copy(update={"output": None, "cut": 0})
        return end if end.status else end.model_copy(update={"status": RunStatus.CANCELLED.value})

    async def cancel(self, child: str, run_id: str) -> None:
        """Cancel a run whose starter `run_id` has ended, and interrupt a worker that holds it."""
        if (await self._cancel(child, run_id)).in_hands:
            await self.control.interrupt([child])

    async def _cancel(self, child: str, run_id: str) -> ControlResult:
        return await self._control.cancel_unread(child, _ended_note(run_id))


def _ended_note(run_id: str) -> str:
    return f"run {run_id}, which has started it, has ended"


def run_end(result: AgentRunResult, most: int = LONGEST_OUTPUT) -> RunEnd:
    """Return the end of a run with the first `most` characters of its output. Pure."""
    output = result.output
    if result.structured is not None:
        output = exact_json.text(to_jsonable_python(result.structured))
    why = result.error or (str(result.explaining) if result.explaining else None)
    return RunEnd(
        run_id=result.run_id,
        agent=result.agent_name,
        status=result.status or "",
        stop_reason=result.stop_reason or "",
        output=None if output is None else output[:most],
        cut=max(len(output or "") - most, 0),
        error=why[:_LONGEST_ERROR] if why else None,
        steps=len(result.steps),
        usage=result.usage,
        cost_usd=result.cost_usd,
        below_usage=result.below_usage,
        below_cost_usd=result.below_cost_usd,
    )


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
            try:
                seconds = await self._follow(dependent, dependent.open)
                if not await self.waiting.wait(dependent, seconds) or await self._go_on(dependent):
                    return
            except SerializationError as error:  # another worker may read it, at the next look
                log.warning("run %s does not begin by this worker: %s", run_id, error)
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
        retention = self._opened.settings.lifetime
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
        for at in range(0, len(runs), RUNS_AT_ONCE):
            page = runs[at : at + RUNS_AT_ONCE]
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
    with reading:
        state = AgentState.from_json(unpacked(header["slim"]))
    structured = state.answer.structured if state.answer else None
    return Before(name, answer_text(state.last_output, structured))
