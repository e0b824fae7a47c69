"""Looks of workers at runs that wait for others: the product's own loop, watched call by call.

It may stall before any of its calls of the store; then others work until it goes on, or is lost.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import orjson
from support.protocol.dependent_model import DependentModel
from support.protocol.rig import Rig

from stepfleet.orchestrator import Message
from stepfleet.orchestrator.store.runs.links import Dependent, Dependents
from stepfleet.worker.runtime.links import LOOK_AGAIN, DependentRuns


class Machine(Protocol):
    """What a look needs of the machine that has it made."""

    rig: Rig
    model: DependentModel

    def operation(self, name: str) -> AbstractContextManager[None]:
        """Check what an operation has left behind."""


class Look:
    """One look of a worker at a run that waits, with a stall before its call number `stall`."""

    def __init__(self, machine: Machine, run_id: str, stall: int | None) -> None:
        self.machine, self.run_id = machine, run_id
        self.left, self.seen = stall, machine.model.runs[run_id].seq
        self.ready: dict[str, str | None] = {}
        self._runs = DependentRuns(machine.rig.bench.opened)
        self._runs.waiting = Watched(self, self._runs.waiting)  # type: ignore[assignment]
        self._released: asyncio.Future[None] | None = None
        self._stalled: asyncio.Future[None] | None = None
        self._work: asyncio.Task[None] | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether it has neither ended nor gone on."""
        return self._work is not None and not self._work.done()

    async def begins(self) -> None:
        """Look at the run, to the end or to the stall. Raises what that raises."""
        loop = asyncio.get_running_loop()
        self._released, self._stalled = loop.create_future(), loop.create_future()
        self._work = loop.create_task(self._runs.attend(self.run_id))
        await asyncio.wait({self._work, self._stalled}, return_when=asyncio.FIRST_COMPLETED)
        if self._work.done():
            self._ended()

    async def goes_on(self) -> None:
        """Go on behind the stall."""
        assert self._released is not None
        assert self._work is not None
        self._released.set_result(None)
        await asyncio.wait({self._work})
        self._ended()

    async def is_lost(self) -> None:
        """End it where it stalls: its worker was killed."""
        assert self._work is not None
        self._work.cancel()
        await asyncio.wait({self._work})

    async def pauses(self) -> None:
        """Stall here, if this is the call."""
        if self.left == 0:
            assert self._stalled is not None
            assert self._released is not None
            self._stalled.set_result(None)
            await self._released
        self.left = None if self.left is None else self.left - 1

    def _ended(self) -> None:
        assert self._work is not None
        self._work.result()
        model = self.machine.model
        run = model.runs.get(self.run_id)
        is_same = run is not None and run.seq == self.seen  # else its next look is another's
        if run and is_same and run.after and run.status in {"queued", "in_progress"}:
            assert model.ahead(run), f"{self.run_id}: all have ended, and it was left as it was"


class Watched:
    """The product's calls of the store for one look, each compared with the model."""

    def __init__(self, look: Look, calls: Dependents) -> None:
        self._look, self._calls = look, calls
        self._machine, self._model = look.machine, look.machine.model

    async def read(self, run_id: str) -> Dependent | None:
        """Read the run: None where it does not wait any more."""
        found = await self._calls.read(run_id)
        run = self._model.runs.get(run_id)
        waits = run is not None and bool(run.after)
        assert (found is not None) == waits, f"{run_id} waits: {waits}"
        if found and run:
            assert list(found.open) == self._model.ahead(run)
        return found

    async def follow(self, dependent: Dependent, runs: Sequence[str]) -> list[str]:
        """Ask for the ends of runs."""
        await self._look.pauses()
        with self._machine.operation("follow"):
            expected = [self._model.ask_for_end(dependent.run_id, one) for one in runs]
            told = await self._calls.follow(dependent, runs)
            assert told == expected
        return told

    async def arrived(self, run_id: str, before: str, agent: str = "") -> None:
        """Note an end that was there already."""
        await self._look.pauses()
        with self._machine.operation("arrived"):
            await self._calls.arrived(run_id, before, agent)
            self._model.arrived(run_id, before)

    async def wait(self, dependent: Dependent, seconds: float) -> bool:
        """Put the next look off; what the runs before have come to counts as it is now."""
        await self._look.pauses()
        assert seconds == LOOK_AGAIN
        with self._machine.operation("look later"):
            expected = self._model.look_later(
                dependent.run_id, _seen(dependent), round(seconds * 1000)
            )
            is_ready = await self._calls.wait(dependent, seconds)
            assert is_ready == (expected == "ready")
        run = self._model.runs.get(dependent.run_id)
        if is_ready and run:
            self._look.ready = {one: self._result(one) for one in run.after}
        return is_ready

    async def wait_again(self, dependent: Dependent, run: str) -> None:
        """Wait for one that goes on: nobody else is waited for again."""
        assert self._look.ready[run] == "active", f"{run} had ended, and is waited for again"
        await self._look.pauses()
        with self._machine.operation("wait again"):
            self._model.wait_again(dependent.run_id, _seen(dependent), run)
            await self._calls.wait_again(dependent, run)

    async def begin(self, dependent: Dependent, messages: Sequence[Message]) -> bool:
        """Let it begin: all have ended, none of them badly or that does not matter."""
        ready, run = self._look.ready, self._model.runs.get(dependent.run_id)
        assert "active" not in ready.values(), f"{dependent.run_id} begins before all have ended"
        assert not (run and run.stops and None in ready.values()), "begins behind a failed run"
        told = {one["id"]: one.get("output") for one in orjson.loads(messages[0].text)}
        assert told == ready, f"{dependent.run_id}: input {told}, expected {ready}"
        await self._look.pauses()
        with self._machine.operation("begin"):
            expected = self._model.let_begin(dependent.run_id, _seen(dependent))
            done = await self._calls.begin(dependent, messages)
            assert done == (expected == "begin")
        if done:
            stored = await self._machine.rig.bench.stored(dependent.run_id)
            assert stored.state.messages[-1].text == messages[0].text
        return done

    async def end(self, dependent: Dependent, fields: Mapping[str, Any]) -> bool:
        """End it: all have ended, and one that had to complete has not."""
        ready = self._look.ready
        assert "active" not in ready.values(), f"{dependent.run_id} ends before all have ended"
        assert dependent.after.failed == "stop", "ends though it was to begin"
        assert None in ready.values(), "ends though all have completed"
        await self._look.pauses()
        with self._machine.operation("end without a step"):
            expected = self._model.let_end(dependent.run_id, _seen(dependent))
            done = await self._calls.end(dependent, fields)
            assert done == (expected == "end")
        return done

    async def input_of(self, run_id: str) -> tuple[Message, ...]:
        """Read the messages that it was submitted with."""
        return await self._calls.input_of(run_id)

    def _result(self, run_id: str) -> str | None:
        """Return a run's answer, None of one that has failed or is gone, or 'active'."""
        run = self._model.runs.get(run_id)
        if run and not run.ended:
            return "active"
        return run.log[-1].author if run and run.status == "completed" else None


def _seen(dependent: Dependent) -> int:
    return int(dependent.header.get("seq") or 0)
