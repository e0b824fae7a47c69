"""Tool workers under hypothesis: they take, keep, leave and deliver the calls of waiting runs."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from support.protocol.call_model import CallHint, WaitingModel
from support.protocol.model import GRACE, LEASE, Run
from support.protocol.rig import Rig
from support.protocol.worker import Worker

from stepfleet.orchestrator import ToolCallRecord
from stepfleet.orchestrator.protocol.claim import Losses, Work
from stepfleet.orchestrator.protocol.waiting import Delivered, TakenCall
from stepfleet.orchestrator.records.run.results import LostAttempt

PICK = st.integers(0, 63)
SIZE = st.integers(1, 9)


@dataclass
class Maker:
    """A tool worker with one call."""

    taken: TakenCall
    size: int = 0

    @property
    def token(self) -> str:
        return self.taken.token

    @property
    def record(self) -> ToolCallRecord:
        call = self.taken.call
        return ToolCallRecord(
            tool_name=call.name, call_id=call.id, result=self.token, timestamp=self.taken.now
        )


def told_of(losses: Losses) -> list[tuple[str, str]]:
    """Return the losses that a claim tells of, as the model has them."""
    return [(one.token, f"{one.how}{one.group or ''}") for one in losses.known]


class Operations(RuleBasedStateMachine):
    """What rules use of the machine that they are part of."""

    rig: Rig
    model: WaitingModel
    tokens: int
    workers: list[Worker]

    if TYPE_CHECKING:

        def operation(self, name: str) -> AbstractContextManager[None]: ...

        def _run(self, pick: int) -> Run: ...

        def _worker(self, pick: int) -> Worker: ...

        def _deliver(self, *, keep: bool) -> Worker | None: ...

        def _claim(self, run_id: str, step: int, token: str = "") -> Worker | None: ...

        def _commit(self, worker: Worker, kind: str, size: int) -> None: ...

        def note(self, worker: Worker, size: int) -> None: ...

        def park(self, worker: Worker, kind: str, size: int) -> None: ...

        def send(self, worker: Worker) -> None: ...

        def comes_again(self, worker: Worker) -> None: ...

        def ask(self, run: Run, word: str) -> None: ...

        def clock_jumps(self, by: int) -> None: ...

        def rescue(self, *, long_queue: bool) -> None: ...


class CallRules(Operations):
    """The operations of tool workers."""

    makers: list[Maker]

    @precondition(lambda self: self.model.queue)
    @rule(
        size=SIZE,
        journaled=st.integers(1, 3),
        meanwhile=st.sampled_from(["", "", "cancel", "pause"]),
        kind=st.sampled_from(["park", "park", "park one"]),
        made=st.sampled_from(["", "taken", "kept", "delivered"]),
    )
    def step_parks(self, size: int, journaled: int, meanwhile: str, kind: str, made: str) -> None:
        """A step comes as far as its heavy calls; their worker may be quick."""
        worker = self._deliver(keep=False)
        if worker is None:
            return
        for _ in range(journaled):
            self.note(worker, size)
        if meanwhile:
            self.ask(self.model.runs[worker.claim.run_id], meanwhile)
        self.park(worker, kind, size)
        if kind == "park one":  # a hint of a call that the run waits for later, or not any more
            self.take(worker.claim.run_id, worker.claim.step, 1)
        maker = self.next_call(keep=False) if made and self.model.call_queue else None
        if maker and made == "kept":
            self.call_is_kept_by(maker)
        if maker and made == "delivered":
            self.call_is_delivered_by(maker, size)

    @precondition(lambda self: self.model.pick(lambda run: run.is_waiting))
    @rule(pick=PICK, word=st.sampled_from(["pause", "pause", "cancel"]), size=SIZE)
    def waiting_run_is_asked(self, pick: int, word: str, size: int) -> None:
        """Nobody holds the step; the calls under way are delivered behind the request."""
        run = self._waiting(pick)
        makers = self._makers_of(run)
        self.ask(run, word)
        for maker in makers:
            self.call_is_delivered_by(maker, size)

    @precondition(lambda self: self.model.pick(lambda run: run.is_waiting))
    @rule(pick=PICK, size=SIZE)
    def cancelled_wait_goes_on(self, pick: int, size: int) -> None:
        """The run is taken up again while its call is still being made."""
        run = self._waiting(pick)
        makers = self._makers_of(run)
        self.ask(run, "cancel")
        self.ask(run, "retry")
        worker = self._claim(run.run_id, run.step)
        for maker in makers:
            self.call_is_delivered_by(maker, size)
        if worker:
            self.park(worker, "park", size)

    @precondition(lambda self: self.model.pick(lambda run: run.is_waiting))
    @rule(pick=PICK)
    def one_call_is_lost_beside_a_held_one(self, pick: int) -> None:
        run = self._waiting(pick)
        self.take(run.run_id, run.step, run.awaited[0])
        self.clock_jumps(GRACE)
        self.rescue(long_queue=False)

    @precondition(lambda self: self.model.pick(lambda run: run.is_waiting))
    @rule(pick=PICK, group=st.integers(1, 9), end=st.sampled_from(["seen", "unseen", "unseen"]))
    def waiting_call_is_tried_in_company(self, pick: int, group: int, end: str) -> None:
        """A process for suspects takes a call whose message it has, and is lost with it."""
        run = self._waiting(pick)
        maker = self.take(run.run_id, run.step, run.awaited[pick % len(run.awaited)])
        if maker:
            self.call_is_tried_by(maker, group, end)

    def _waiting(self, pick: int) -> Run:
        waiting = self.model.pick(lambda run: run.is_waiting)
        return waiting[pick % len(waiting)]

    def _makers_of(self, run: Run) -> list[Maker]:
        owners = {run.calls[index].owner for index in run.owned_calls}
        return [maker for maker in self.makers if maker.token in owners]

    @precondition(lambda self: self.model.call_queue)
    @rule(twice=st.sampled_from([False, False, True]), size=SIZE, fast=st.booleans())
    def call_is_taken(self, twice: bool, size: int, fast: bool) -> None:
        """A tool's message reaches a worker; a fast one delivers at once."""
        maker = self.next_call(keep=twice)
        if maker and fast:
            self.call_is_delivered_by(maker, size)

    @precondition(lambda self: self.model.call_queue)
    @rule(
        ends=st.lists(
            st.sampled_from(["", "kept", "left", "seen", "unseen", "delivered", "delivered"]),
            min_size=1,
            max_size=4,
        ),
        size=SIZE,
    )
    def calls_are_worked_on(self, ends: list[str], size: int) -> None:
        """Tool workers take the calls that wait, one after the other."""
        for end in ends:
            maker = self.next_call(keep=False) if self.model.call_queue else None
            if maker and end == "kept":
                self.call_is_kept_by(maker)
            elif maker and end == "left":
                self.call_is_left_by(maker, started=size % 2 == 0, delay=0)
            elif maker and end.endswith("seen"):
                self.call_is_tried_by(maker, size, end)
            elif maker and end:
                self.call_is_delivered_by(maker, size)

    def next_call(self, *, keep: bool) -> Maker | None:
        with self.operation("deliver call"):
            expected = self.model.call_queue[-1] if keep else self.model.call_queue.pop()
            assert self.rig.auditor.take_call(keep=keep) == expected
        return self.take(*expected)

    @precondition(lambda self: self.model.runs)
    @rule(pick=PICK, index=st.integers(0, 1), offset=st.sampled_from([0, 0, 0, -1, 1]))
    def call_from_nowhere(self, pick: int, index: int, offset: int) -> None:
        """A duplicate or stale message."""
        runs = list(self.model.runs.values())
        run = runs[pick % len(runs)]
        self.take(run.run_id, max(run.step + offset, 0), index)

    @precondition(lambda self: self.makers)
    @rule(pick=PICK)
    def call_is_taken_again(self, pick: int) -> None:
        """The reply was lost."""
        taken = self._maker(pick).taken
        hint = taken.hint
        self.take(hint.run_id, hint.step, taken.index, taken.token)

    def take(self, run_id: str, step: int, index: int, token: str = "") -> Maker | None:
        repeated = bool(token)
        if not token:
            self.tokens += 1
            token = f"<{self.tokens}>"
        with self.operation("take"):
            expected = self.model.take(run_id, step, index, token)
            hint = Work(run_id, step, index)
            reply = self.rig.do(self.rig.bench.steps.calls.take(hint, token))
            word = "taken" if isinstance(reply, TakenCall) else reply.why.value
            assert word == expected, f"take of {hint}: {word}, expected {expected}"
            if not isinstance(reply, TakenCall):
                return None
            call = self.model.runs[run_id].calls[index]
            assert (reply.attempt, reply.crashes) == (call.starts, call.crashes)
            assert told_of(reply.losses) == list(call.losses.items())[-call.crashes or 99 :]
        if not repeated:
            self.makers.append(Maker(reply))
        return self.makers[-1]

    @precondition(lambda self: self.makers)
    @rule(pick=PICK)
    def call_is_kept(self, pick: int) -> None:
        self.call_is_kept_by(self._maker(pick))

    def call_is_kept_by(self, maker: Maker) -> None:
        taken = maker.taken
        hint = taken.hint
        with self.operation("keep"):
            expected = self.model.keep(hint.run_id, hint.step, taken.index, taken.token)
            kept = self.rig.do(self.rig.bench.steps.calls.keep(hint, taken.token, 0.5))
            assert kept.ours == expected

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, group=st.integers(1, 9), end=st.sampled_from(["", "seen", "unseen"]))
    def tried_in_company(self, pick: int, group: int, end: str) -> None:
        """A process for suspects begins the step; whoever started it may see its death.

        What that process had sent before may come behind that.
        """
        worker = self._worker(pick)
        claim, marks = worker.claim, self.rig.marks()
        hint = Work(claim.run_id, claim.step)
        given = (claim.run_id, claim.step, claim.token, group)
        with self.operation("step in company"):
            expected = self.model.begin(*given)
            assert self.rig.do(marks.begin(hint, claim.token, group)) == expected
        if end == "seen":
            with self.operation("death of a step's process"):
                self.model.died(*given)
                self.rig.do(marks.died(hint, claim.token, group, claim.config.name))
            if group % 2:
                self.comes_again(worker)
            elif pick % 2:
                self._commit(worker, "answer", group)
        elif end:
            self.clock_jumps(LEASE)
            self._claim(claim.run_id, claim.step)

    @precondition(lambda self: self.makers)
    @rule(pick=PICK, group=st.integers(1, 9), end=st.sampled_from(["", "seen", "unseen"]))
    def call_is_tried_in_company(self, pick: int, group: int, end: str) -> None:
        """A process for suspects begins the call; whoever started it may see its death.

        What that process had sent before may come behind that.
        """
        self.call_is_tried_by(self._maker(pick), group, end)

    def call_is_tried_by(self, maker: Maker, group: int, end: str) -> None:
        taken = maker.taken
        hint, marks = taken.hint, self.rig.marks()
        given = (hint.run_id, hint.step, taken.index, taken.token, group)
        with self.operation("call in company"):
            expected = self.model.call_begins(*given)
            assert self.rig.do(marks.begin(hint, taken.token, group)) == expected
        if end == "seen":
            with self.operation("death of a call's process"):
                self.model.call_died(*given)
                self.rig.do(marks.died(hint, taken.token, group, taken.config.name))
            if group % 3 == 0:
                self.call_is_delivered_by(maker, group)
            elif group % 3 == 1:
                self.take(hint.run_id, hint.step, taken.index)
        elif end:
            self.clock_jumps(LEASE)
            self.take(hint.run_id, hint.step, taken.index)

    @precondition(lambda self: self.makers)
    @rule(pick=PICK, started=st.booleans(), delay=st.sampled_from([0, GRACE]))
    def call_is_left(self, pick: int, started: bool, delay: int) -> None:
        self.call_is_left_by(self._maker(pick), started=started, delay=delay)

    def call_is_left_by(self, maker: Maker, *, started: bool, delay: int) -> None:
        taken = maker.taken
        hint = taken.hint
        entry = LostAttempt(kind="interrupted", step=hint.step + 1) if started else None
        with self.operation("leave"):
            self.model.leave(
                hint.run_id, hint.step, taken.index, taken.token, delay=delay, started=started
            )
            self.rig.do(
                self.rig.bench.steps.calls.leave(
                    hint, taken.token, delay=delay / 1000, started=started, lost=entry
                )
            )

    @precondition(lambda self: self.makers)
    @rule(pick=PICK, size=SIZE)
    def call_is_delivered(self, pick: int, size: int) -> None:
        """A first time, again because the reply was lost, or too late."""
        self.call_is_delivered_by(self._maker(pick), size)

    def call_is_delivered_by(self, maker: Maker, size: int) -> None:
        maker.size = maker.size or size
        hint = maker.taken.hint
        with self.operation("deliver result"):
            expected = self.model.deliver(
                hint.run_id, hint.step, maker.taken.index, maker.token, maker.size
            )
            reply: Delivered = self.rig.do(
                self.rig.bench.steps.calls.deliver(
                    maker.taken,
                    maker.taken.config.name,
                    maker.record,
                    maker.size / 2,
                )
            )
            assert reply.applied == expected, f"delivery of {hint}: {reply}, expected {expected}"

    @precondition(lambda self: self.model.pick(lambda run: bool(run.owned_calls)))
    @rule(pick=PICK, elsewhere=st.booleans())
    def tool_worker_stands_still(self, pick: int, elsewhere: bool) -> None:
        """Its lease runs out, and the rescuer or another worker is faster."""
        runs = self.model.pick(lambda run: bool(run.owned_calls))
        run = runs[pick % len(runs)]
        with self.operation("clock"):
            self.model.pass_time(LEASE)
            self.rig.auditor.shift(list(self.model.runs), LEASE)
        if elsewhere:
            self.take(run.run_id, run.step, run.owned_calls[0])

    @precondition(lambda self: self.model.call_queue)
    @rule()
    def tools_broker_is_wiped(self) -> None:
        with self.operation("loss"):
            self.model.call_queue.clear()
            self.rig.auditor.lose_calls()

    def calls_are_dispatched_again(self, expected: list[CallHint]) -> None:
        """Compare what the rescuer has sent, in whatever order, with what it should have."""
        told = self.rig.auditor.newest_calls(len(expected)) if expected else []
        assert sorted(told) == sorted(expected)
        self.model.call_queue += told

    def calls_are_made(self) -> None:
        """Make every call whose message waits."""
        while self.model.call_queue:
            maker = self.next_call(keep=False)
            if maker:
                self.call_is_delivered_by(maker, 1)

    def _maker(self, pick: int) -> Maker:
        recent = self.makers[-3:] if pick < 48 else self.makers
        return recent[pick % len(recent)]
