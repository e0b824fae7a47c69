"""Requests under hypothesis: cancel, pause, resume and retry, in time, too late, and repeated."""

from collections.abc import Callable
from functools import partial

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from support.protocol.audit import BATCHES, check_upkeep
from support.protocol.calls import Operations
from support.protocol.model import GRACE, LEASE, Run, shard_of
from support.protocol.worker import KINDS

from stepfleet.orchestrator import StoredRun
from stepfleet.orchestrator.protocol.revision import Revision, revise
from stepfleet.orchestrator.store.batches.requests import BatchRequest

PICK = st.integers(0, 63)
SIZE = st.integers(1, 9)
OFTEN = 48


class ControlRules(Operations):
    """The operations of those who steer runs."""

    seen: list[tuple[StoredRun, int]]
    asked: list[Callable[[], None]]

    @precondition(lambda self: self.model.runs)
    @rule(pick=PICK, word=st.sampled_from(["cancel", "pause", "resume"]))
    def control(self, pick: int, word: str) -> None:
        self._control(self._run(pick), word)

    @precondition(lambda self: self.model.pick(lambda run: bool(run.token)))
    @rule(
        pick=PICK, word=st.sampled_from(["cancel", "pause", "pause"]), kind=st.sampled_from(KINDS)
    )
    def control_while_it_is_held(self, pick: int, word: str, kind: str) -> None:
        """A request that its owner learns of at its commit, or later, or never."""
        held = self.model.pick(lambda run: bool(run.token))
        run = held[pick % len(held)]
        self._control(run, word)
        owners = [worker for worker in self.workers if worker.token == run.token]
        if owners and pick % 4:
            self._commit(owners[-1], kind, 1)

    @precondition(lambda self: self.model.pick(lambda run: run.ended and run.batch))
    @rule()
    def upkeep(self) -> None:
        """A worker looks which batches have ended as a whole, or begun anew."""
        with self.operation("upkeep"):
            self.rig.do(self.rig.bench.keep_up())
        check_upkeep(self.rig.auditor.dump(list(self.model.runs)))

    @precondition(lambda self: self.model.runs)
    @rule(batch=st.sampled_from(BATCHES), word=st.sampled_from(["pause", "resume", "cancel"]))
    def batch_is_asked(self, batch: str, word: str) -> None:
        """A request to a batch is in force on all shards; a cancel reaches all runs before it."""
        if self.model.flags.get(batch, ("",))[0] == "cancel":
            self.sweep(batch)
        self.tokens += 1
        fields = self.rig.bench.control.batch_cancel("enough")
        with self.operation("flag"):
            self.rig.do(self.rig.requests.flag(BatchRequest(batch, 0, word, self.tokens, fields)))
            # A batch that was cancelled gets no more runs: here it does.
            self.rig.auditor.uncancel(batch)
            self.model.flag(batch, word, self.tokens)

    @precondition(lambda self: self.model.queue)
    @rule(
        before=st.sampled_from(["", "", "pause", "cancel"]),
        word=st.sampled_from(["pause", "resume", "cancel"]),
        then=st.sampled_from([*["renew"] * 4, *KINDS]),
        size=SIZE,
    )
    def batch_is_asked_of_a_held_run(self, before: str, word: str, then: str, size: int) -> None:
        """Its owner learns of the request before that is brought to the run."""
        worker = self._deliver(keep=False)
        if worker is None:
            return
        run = self.model.runs[worker.claim.run_id]
        if size % 2:
            self.note(worker, size)
        if before:
            self._control(run, before)
        if run.batch:
            self.batch_is_asked(run.batch, word)
        if then == "renew":
            self.note(worker, size)
        else:
            self._commit(worker, then, size)

    @precondition(lambda self: self.model.queue)
    @rule(since=st.sampled_from(["", "", "resume", "resume", "pause", "cancel"]), size=SIZE)
    def batch_is_held(self, since: str, size: int) -> None:
        """A step met the error that holds its batch; perhaps the batch was resumed meanwhile."""
        worker = self._deliver(keep=False)
        if worker is None or not worker.claim.batch_id:
            return
        self.tokens += 1
        worker.hold(self.tokens)
        if since:
            self.batch_is_asked(worker.claim.batch_id, since)
            if size % 2:
                self.request_is_over(worker.claim.batch_id, late=False)
        if worker.sent:
            self.send(worker)

    @precondition(lambda self: self.model.flags)
    @rule(batch=st.sampled_from(BATCHES))
    def sweep(self, batch: str) -> None:
        """The request is brought to the batch's runs."""
        if batch not in self.model.flags:
            return
        word, number = self.model.flags[batch]
        named: dict[int, list[str]] = {}
        for run in self.model.pick(lambda run: run.batch == batch):
            named.setdefault(shard_of(run.run_id), []).append(run.run_id)
        with self.operation("sweep"):
            hints = self.model.sweep(batch)
            for run_ids in named.values():
                request = BatchRequest(batch, 0, word, number)
                self.rig.do(self.rig.requests.sweep_runs(request, run_ids, self.rig.pace))
            told = self.rig.auditor.newest_messages(len(hints)) if hints else []
            assert sorted(told) == sorted(hints)
            self.model.queue += told

    @precondition(lambda self: self.model.flags)
    @rule(batch=st.sampled_from(BATCHES), late=st.booleans())
    def request_is_over(self, batch: str, late: bool) -> None:
        """All runs know of a request: it is taken away, and may come late behind that."""
        if batch not in self.model.flags:
            return
        self.sweep(batch)
        word, number = self.model.flags[batch]
        with self.operation("lift"):
            self.rig.do(self.rig.requests.lift(BatchRequest(batch, 0, word, number)))
            self.model.lift(batch)
        if late:
            self._comes_late(batch, word, number)

    @precondition(lambda self: self.model.requests)
    @rule(pick=PICK)
    def request_comes_late(self, pick: int) -> None:
        """Somebody who had stalled puts an old request in force: it changes nothing."""
        self._comes_late(*self.model.requests[-1 - pick % len(self.model.requests)])

    def _comes_late(self, batch: str, word: str, number: int) -> None:
        fields = self.rig.bench.control.batch_cancel("enough")
        with self.operation("late flag"):
            self.rig.do(self.rig.requests.flag(BatchRequest(batch, 0, word, number, fields)))
            self.rig.auditor.uncancel(batch)

    @precondition(lambda self: self.model.queue or self.model.fleet_paused)
    @rule(pick=PICK, then=st.sampled_from(["claim", "rescue", ""]))
    def fleet_pauses(self, pick: int, then: str) -> None:
        """No step begins anywhere, until they may again; few pauses outlast the next operation.

        While one lasts, the other rules have little to do: it would fill the examples.
        """
        if not self.model.fleet_paused:
            self._pause_fleet(paused=True)
            if then == "claim" and self.model.queue:
                self._deliver(keep=pick % 2 == 0)
            elif then == "rescue":
                self.clock_jumps(GRACE)
                self.rescue(long_queue=False)
        if pick < OFTEN:
            self.fleet_goes_on()

    @precondition(lambda self: self.model.queue and not self.model.fleet_paused)
    @rule(size=SIZE)
    def fleet_pauses_before_a_tool(self, size: int) -> None:
        """A step that is under way starts no tool while the fleet is paused."""
        worker = self._deliver(keep=False)
        if worker is None:
            return
        self.note(worker, size)
        self._pause_fleet(paused=True)
        self.note(worker, size)
        self.fleet_goes_on()

    @precondition(lambda self: self.model.pick(lambda run: bool(run.token)))
    @rule(pick=PICK)
    def cancelled_owner_is_lost_in_a_paused_fleet(self, pick: int) -> None:
        """The rescuer lets somebody end the run though no step may begin."""
        held = self.model.pick(lambda run: bool(run.token))
        self._control(held[pick % len(held)], "cancel")
        if not self.model.fleet_paused:
            self._pause_fleet(paused=True)
        self.clock_jumps(LEASE)
        self.rescue(long_queue=False)
        self.fleet_goes_on()

    def fleet_goes_on(self) -> None:
        """Let steps begin again, if none may."""
        if self.model.fleet_paused:
            self._pause_fleet(paused=False)

    def _pause_fleet(self, *, paused: bool) -> None:
        opened = self.rig.bench.opened
        with self.operation("fleet"):
            self.rig.do(opened.requests.pause_fleet(paused=paused))
            self.model.fleet_paused = paused

    @precondition(lambda self: self.asked)
    @rule(pick=PICK)
    def ask_again(self, pick: int) -> None:
        """The reply to a request was lost: the same one comes again, whatever happened since."""
        recent = self.asked[-4:] if pick < OFTEN else self.asked
        recent[pick % len(recent)]()

    def _control(self, run: Run, word: str) -> None:
        stored = self.rig.do(self.rig.bench.stored(run.run_id))
        request = self._next_request()
        self.asked.append(partial(self._ask, stored, word, request, run.step))
        self.asked[-1]()

    def _ask(self, stored: StoredRun, word: str, request: str, step: int) -> None:
        control, run_id = self.rig.bench.control, stored.run_id

        def cancel() -> str:
            return self.model.cancel(run_id)

        def pause() -> str:
            return self.model.pause(run_id)

        def resume() -> str:
            return self.model.resume(run_id, step)

        with self.operation(word):
            match word:
                case "cancel":
                    answer = self.rig.do(control.cancel(stored, "enough", request))
                    expected = self.model.once(run_id, request, cancel)
                case "pause":
                    answer = self.rig.do(control.pause(run_id, request))
                    expected = self.model.once(run_id, request, pause)
                case _:
                    answer = self.rig.do(control.resume(stored, request))
                    expected = self.model.once(run_id, request, resume)
            assert answer.outcome == expected

    def _next_request(self) -> str:
        self.tokens += 1
        return f"ask{self.tokens}"

    @precondition(lambda self: self.model.pick(lambda run: run.ended))
    @rule(pick=PICK, raised=st.booleans())
    def retry(self, pick: int, raised: bool) -> None:
        ended = self.model.pick(lambda run: run.ended)
        run = ended[pick % len(ended)]
        stored = self.rig.do(self.rig.bench.stored(run.run_id))
        self.seen.append((stored, run.seq))
        self._retry(stored, run.seq, raised=raised)

    @precondition(lambda self: self.seen)
    @rule(pick=PICK, raised=st.booleans())
    def retry_what_was_seen(self, pick: int, raised: bool) -> None:
        """Somebody who had read the run before asks too late, perhaps behind its next end."""
        self._retry(*self.seen[pick % len(self.seen)], raised=raised)

    @precondition(lambda self: self.model.pick(lambda run: run.ended))
    @rule(pick=PICK, kind=st.sampled_from(["broken", "broken", "error", "answer"]), size=SIZE)
    def retry_comes_behind_another_end(self, pick: int, kind: str, size: int) -> None:
        """Two ask at once; the faster one's retry has ended the run again when the other comes."""
        ended = self.model.pick(lambda run: run.ended)
        run = ended[pick % len(ended)]
        stored, seq = self.rig.do(self.rig.bench.stored(run.run_id)), run.seq
        self._retry(stored, seq, raised=False)
        worker = self._claim(run.run_id, run.step)
        if worker:
            self._commit(worker, kind, size)
        self._retry(stored, seq, raised=pick % 2 == 0)
        if run.ended:
            self._retry(self.rig.do(self.rig.bench.stored(run.run_id)), run.seq, raised=False)

    def _retry(self, stored: StoredRun, seq: int, *, raised: bool) -> None:
        overrides = {"max_steps": 8} if raised else stored.overrides
        revision = revise(stored.state, stored.log, overrides, stored.state.info.updated_at)
        request = self._next_request()
        self.asked.append(partial(self._take_up, stored, revision, seq, request))
        self.asked[-1]()

    def _take_up(self, stored: StoredRun, revision: Revision, seq: int, request: str) -> None:
        def retry() -> str:
            return self.model.retry(stored.run_id, seq)

        with self.operation("retry"):
            control = self.rig.bench.control
            answer = self.rig.do(control.retry(stored, revision, request=request))
            assert answer.outcome == self.model.once(stored.run_id, request, retry)
