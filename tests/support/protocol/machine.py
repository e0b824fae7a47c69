"""The step protocol under hypothesis: operations drawn at random on a real Redis and on the model.

After every operation the answers are compared, the raw records held against the invariants, and
everything stored against the model. At the end of an example every run is brought to its end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.protocol.audit import BATCHES, Dump, check_invariants, check_model
from support.protocol.call_model import Park, WaitingModel
from support.protocol.calls import CallRules, Maker, told_of
from support.protocol.control import ControlRules
from support.protocol.model import GRACE, LEASE, RETRY_WAIT, Decision, Run
from support.protocol.rig import Rig, check_as_clients_see_it
from support.protocol.worker import AGENTS, CIRCUIT, KINDS, Worker, record_of

from stepfleet.orchestrator import Message, StoredRun
from stepfleet.orchestrator.protocol.claim import Claim, Work
from stepfleet.orchestrator.protocol.lost_attempts import CallEntries
from stepfleet.orchestrator.protocol.revision import price_of
from stepfleet.orchestrator.protocol.verdict import Verdict
from stepfleet.orchestrator.store.runs.submission import NewRun

MOST_RUNS = 5
MANY = 8
UNKNOWN = 63
LONG = 20_000_000
JUMPS = (GRACE, RETRY_WAIT, LEASE, LEASE, LONG, -GRACE)
ROUNDS_TO_THE_END = 12
OFTEN = 48
MORE = 5
"""Further searches for operations that were too rare."""

PICK = st.integers(0, 63)
SIZE = st.integers(1, 9)


def run_machine(shared: Rig, profile: settings, kind: Any = None) -> None:
    """Run random examples as `profile` says. Raises `AssertionError` on the first difference."""
    machine: Any = partial(kind or ProtocolMachine, shared)
    run_state_machine_as_test(machine, settings=profile)


def run_until_all(
    shared: Rig, profile: settings, operations: set[str], kind: Any = None, times: int = 1
) -> None:
    """Run examples until each of the operations was done so many times.

    In the company of other modules Hypothesis draws other examples, and an operation may be rarer.
    """
    run_machine(shared, profile, kind)
    for _ in range(MORE):
        if all(shared.told.get(name, 0) >= times for name in operations):
            break
        run_machine(shared, settings(profile, derandomize=False), kind)
    assert shared.told.keys() >= operations
    assert min(shared.told[name] for name in operations) >= times, shared.told


class ProtocolMachine(CallRules, ControlRules):
    """Five runs at most, any number of workers, every operation of the protocol."""

    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self.rig = rig
        self.model = WaitingModel()
        self.workers: list[Worker] = []
        self.makers: list[Maker] = []
        self.seen: list[tuple[StoredRun, int]] = []
        self.asked: list[Callable[[], None]] = []
        self.tokens = 0
        self.sound = True
        rig.examples += 1
        rig.auditor.flush()

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """One operation; what it left behind is checked at its end."""
        self.sound = False
        yield
        self.rig.follow(self.model)
        dump = self.rig.auditor.dump(list(self.model.runs))
        check_invariants(dump)
        check_model(dump, self.model)
        self.check(dump)
        self.rig.operations += 1
        self.rig.told[name] = self.rig.told.get(name, 0) + 1
        self.sound = True

    def check(self, dump: Dump) -> None:
        """Check what more a machine knows of."""

    # ------------------------------------------------------------------ submission and claims

    @precondition(lambda self: len(self.model.runs) < MOST_RUNS)
    @rule(batch=st.sampled_from([*BATCHES, BATCHES[0], ""]), agent=PICK, delayed=st.booleans())
    def create(self, batch: str, agent: int, delayed: bool) -> None:
        self._create(f"r{len(self.model.runs)}", batch, agent, delayed=delayed and agent > 40)

    @precondition(lambda self: self.model.runs)
    @rule(pick=PICK)
    def create_again(self, pick: int) -> None:
        run = self._run(pick)
        self._create(run.run_id, run.batch, 0, delayed=False)

    def _create(self, run_id: str, batch: str, agent: int, *, delayed: bool) -> None:
        which = agent % len(AGENTS)
        new = NewRun(
            run_id,
            AGENTS[which].name,
            self.rig.configs[which],
            (Message.user("hello"),),
            4,
            batch_id=batch,
            delay=RETRY_WAIT / 1000 if delayed else 0.0,
        )
        with self.operation("create"):
            created = self.rig.do(self.rig.bench.submission.create(new))
            assert created == self.model.create(run_id, batch, RETRY_WAIT if delayed else 0)
            self.rig.do(self.rig.bench.submission.publish([new] if created else []))

    @precondition(lambda self: self.model.queue)
    @rule(twice=st.sampled_from([False, False, True]))
    def deliver(self, twice: bool) -> None:
        """A message reaches a worker; some are delivered again later."""
        self._deliver(keep=twice)

    @precondition(lambda self: self.model.queue)
    @rule(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6), size=SIZE)
    def work(self, kinds: list[str], size: int) -> None:
        """Whole steps, one after the other, as a worker without trouble does them."""
        for kind in kinds:
            worker = self._deliver(keep=False) if self.model.queue else None
            if worker and kind.startswith("park"):
                self.note(worker, size)
            if worker:
                self._commit(worker, kind, size)

    @precondition(lambda self: self.model.runs)
    @rule(pick=PICK, offset=st.sampled_from([0, 0, -1, -1, 1]))
    def hint_from_nowhere(self, pick: int, offset: int) -> None:
        """A duplicate, a stale message, or one from before the store was rolled back."""
        run = self._run(pick)
        run_id = "nobody" if pick == UNKNOWN else run.run_id
        self._claim(run_id, max(run.step + offset, 0))

    @precondition(lambda self: any(self._may_claim_again(w) for w in self.workers[-MANY:]))
    @rule(pick=PICK)
    def claim_again(self, pick: int) -> None:
        """The reply was lost, or the call comes late out of a dead connection."""
        able = [worker for worker in self.workers[-MANY:] if self._may_claim_again(worker)]
        self.comes_again(able[pick % len(able)])

    def comes_again(self, worker: Worker) -> None:
        if not self._may_claim_again(worker):
            return
        claim = worker.claim
        again = self._claim(claim.run_id, claim.step, worker.token)
        if again:
            self.workers.remove(worker)

    def note(self, worker: Worker, size: int) -> None:
        self._journal(worker, *worker.next_entries(size))

    def park(self, worker: Worker, kind: str, size: int) -> None:
        self._commit(worker, kind, size)

    def ask(self, run: Run, word: str) -> None:
        if word != "retry":
            return self._control(run, word)
        stored = self.rig.do(self.rig.bench.stored(run.run_id))
        return self._retry(stored, run.seq, raised=False)

    def _may_claim_again(self, worker: Worker) -> bool:
        run = self.model.runs[worker.claim.run_id]
        return worker.token not in run.committed or worker.token == run.last_token

    def _deliver(self, *, keep: bool) -> Worker | None:
        with self.operation("deliver"):
            expected = self.model.queue[-1] if keep else self.model.queue.pop()
            assert self.rig.auditor.take_message(keep=keep) == expected
        return self._claim(*expected)

    def _claim(self, run_id: str, step: int, token: str = "") -> Worker | None:
        if not token:
            self.tokens += 1
            token = f"<{self.tokens}>"
        with self.operation("claim"):
            owes = self._owes_at_claim(run_id)
            expected = self.model.claim(run_id, step, token)
            reply = self.rig.do(self.rig.bench.steps.claim(Work(run_id, step), token))
            word = "claimed" if isinstance(reply, Claim) else reply.why.value
            assert word == expected, f"claim of {run_id}:{step}: {word}, expected {expected}"
            if not isinstance(reply, Claim):
                assert reply.owes == (word in owes), f"claim of {run_id}: {reply}"
                return None
            run = self.model.runs[run_id]
            stored = (reply.crashes, reply.attempts, reply.limited, reply.state.step_count)
            assert stored == (run.crashes, run.attempts, run.limited, run.step)
            answers = [one.content for one in reply.state.messages if one.role == "assistant"]
            assert answers == [step.author for step in run.log if step.author]
            assert told_of(reply.losses) == list(run.losses.items())[-run.crashes or 99 :]
            assert round(reply.journal.spent * 2) == run.spent
            assert sorted(reply.overdue) == list(run.awaited)
            self.workers.append(Worker(reply))
            if run.want == "cancel":
                self.workers[-1].hears_of_cancel()
        return self.workers[-1]

    def _owes_at_claim(self, run_id: str) -> set[str]:
        """Return the refusals that would tell a worker now to look after other runs."""
        run = self.model.runs.get(run_id)
        if run is None:
            return set()
        told = {"ended"} if run.ended and (run.returns or run.reach) else set()
        told |= {"paused"} if run.status == "paused" and run.reach else set()
        return told | ({"early"} if run.after else set())

    # ------------------------------------------------------------------- journal and commit

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, size=SIZE, times=st.integers(1, 5))
    def journal(self, pick: int, size: int, times: int) -> None:
        worker = self._worker(pick)
        for _ in range(times):
            self._journal(worker, *worker.next_entries(size))

    @precondition(lambda self: self.workers)
    @rule(pick=PICK)
    def renew(self, pick: int) -> None:
        self._journal(self._worker(pick), None, None, None)

    def _journal(
        self, worker: Worker, response: Any, started: int | None, done: int | None
    ) -> None:
        claim = worker.claim
        entries: dict[str, str] = {}
        record = None if done is None else record_of(claim, done)
        if response is not None:
            entries |= {"response": worker.token, "price": ""}
        if started is not None:
            entries[f"s:{started}"] = "1"
        if done is not None:
            entries[f"r:{done}"] = worker.token
        with self.operation("journal"):
            expected = self.model.journal(claim.run_id, claim.step, worker.token, entries)
            held = self.rig.do(
                self.rig.bench.steps.journal(
                    claim,
                    0.5,
                    response=response,
                    entries=CallEntries(
                        price=price_of(claim.number, None, 0.0, "") if response else None
                    ),
                    started=() if started is None else (started,),
                    results=None if record is None or done is None else {done: record},
                )
            )
            assert (held.want if held.ours else None) == expected
        if held.ours:
            worker.noted(response, None if held.want else started, record)
            if held.want == "cancel":
                worker.hears_of_cancel()

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, kind=st.sampled_from(KINDS), size=SIZE)
    def commit(self, pick: int, kind: str, size: int) -> None:
        self._commit(self._worker(pick), kind, size)

    @precondition(lambda self: any(worker.sent for worker in self.workers))
    @rule(pick=PICK)
    def commit_again(self, pick: int) -> None:
        """The reply was lost; the same call is made again, whatever happened since."""
        senders = [worker for worker in self.workers if worker.sent]
        self.send(senders[pick % len(senders)])

    def _commit(self, worker: Worker, kind: str, size: int) -> None:
        if worker.sent is None or worker.wants_cancel:
            worker.decide(kind, size)
        self.send(worker)

    def send(self, worker: Worker) -> None:
        assert worker.sent is not None
        verdict, events, decision = worker.sent
        claim = worker.claim
        run = self.model.runs[claim.run_id]
        repeated = worker.token in {run.last_token, *run.committed}
        with self.operation("commit hold" if decision.hold else f"commit {decision.move}"):
            expected = self._expected(worker, verdict, decision)
            reply = self.rig.do(self.rig.bench.steps.commit(claim, verdict, events))
            word = "committed" if reply.applied else "wanted" if reply.wanted else "lost"
            told = (word, reply.wanted or reply.status)
            assert told == expected, f"commit of {claim.run_id}:{claim.step}: {told}, {expected}"
            owing = run.returns or bool(run.reach)
            owes = word == "committed" and not repeated and run.ended and owing
            assert reply.owes == owes, f"commit of {claim.run_id}:{claim.step} tells {reply}"
        if reply.wanted:
            worker.sent = None
            worker.hears_of_cancel()

    def _expected(self, worker: Worker, verdict: Verdict, decision: Decision) -> tuple[str, str]:
        claim = worker.claim
        if verdict.waiting:
            calls = verdict.waiting.calls
            waits = {
                one.index: (
                    one.queue,
                    one.key,
                    None if one.within is None else round(one.within * 1000),
                )
                for one in calls
                if one.key
            }
            indexes = [wait.index for wait in calls]
            park = Park(indexes, round(verdict.waiting.seconds * 2), waits)
            return self.model.park(claim.run_id, claim.step, worker.token, park, decision)
        return self.model.commit(claim.run_id, claim.step, worker.token, decision)

    # ------------------------------------------------------------- time, messages, the rescuer

    @precondition(lambda self: self.model.runs)
    @rule(by=st.sampled_from(JUMPS))
    def clock_jumps(self, by: int) -> None:
        """Leases run out, waits end; or a clock was set back."""
        with self.operation("clock"):
            self.model.pass_time(by)
            self.rig.auditor.shift(list(self.model.runs), by)

    @precondition(lambda self: self.model.pick(lambda run: bool(run.token)))
    @rule(pick=PICK, by=st.sampled_from(["claim", "rescue", "cancel", "pause"]))
    def lease_runs_out(self, pick: int, by: str) -> None:
        """A worker stands still; the rescuer comes by, another worker, or a request."""
        held = self.model.pick(lambda run: bool(run.token))
        run = held[pick % len(held)]
        self.clock_jumps(LEASE)
        match by:
            case "claim":
                self._claim(run.run_id, run.step)
            case "rescue":
                self.rescue(long_queue=pick % 2 == 0)
            case _:
                self._control(run, by)

    @precondition(lambda self: self.model.queue)
    @rule()
    def broker_is_wiped(self) -> None:
        with self.operation("loss"):
            self.model.queue.clear()
            self.rig.auditor.lose_messages()

    @precondition(lambda self: self.model.queue)
    @rule()
    def message_is_lost(self) -> None:
        with self.operation("loss"):
            assert self.rig.auditor.take_message(keep=False) == self.model.queue.pop()

    @precondition(lambda self: self.model.pick(lambda run: run.status == "queued"))
    @rule(looks=st.integers(1, 3))
    def runs_wait_in_a_long_queue(self, looks: int) -> None:
        """They are put off, and a hint that was lost comes back though the queue stays long."""
        for by in (GRACE, *(LONG for _ in range(looks))):
            self.clock_jumps(by)
            self.rescue(long_queue=True)

    @precondition(lambda self: self.model.runs)
    @rule(long_queue=st.booleans())
    def rescue(self, long_queue: bool) -> None:
        with self.operation("rescue"):
            calls = self.model.rescue_calls()
            expected, at_the_end = self.model.rescue(long_queue=long_queue)
            count = self.rig.do(self.rig.rescuer(long_queue=long_queue).rescue()) - len(calls)
            self.calls_are_dispatched_again(calls)
            ahead = max(count - len(at_the_end), 0)
            told, behind = self.rig.auditor.newest_at_both_ends(ahead, count - ahead)
            assert sorted(told) == sorted(expected)
            assert sorted(behind) == sorted(at_the_end)
            self.model.queue = behind + self.model.queue + told

    @precondition(lambda self: self.model.out)
    @rule(most=st.sampled_from([0, 1, 2]))
    def wake(self, most: int) -> None:
        """A service answers again: all that wait for it go on; or some are to probe it."""
        with self.operation("wake"):
            circuits = self.rig.circuits()
            before = self.rig.auditor.waiting(CIRCUIT)
            assert before == self.model.out
            able = sum(self.model.waits_for_service(self.model.runs[one]) for one in before)
            woken = self.rig.do(circuits.wake(CIRCUIT, most or None, probes=most > 0))
            popped = before - self.rig.auditor.waiting(CIRCUIT)
            assert woken == min(most or able, able)
            assert popped == before or most
            assert self.model.wake(popped, "probes" if most else "waits") == woken

    # ----------------------------------------------------------------------------------- end

    def teardown(self) -> None:
        """Nothing may be stuck: without further requests every run comes to an end."""
        if not self.sound:
            return
        self.fleet_goes_on()
        for batch in list(self.model.flags):
            self.sweep(batch)
        for _ in range(ROUNDS_TO_THE_END):
            for run in self.model.pick(lambda run: not run.ended):
                self._control(run, "resume")
            if not self.model.pick(lambda run: not run.ended):
                break
            if self.model.queue:
                self.broker_is_wiped()
            self.clock_jumps(LONG)
            self.rescue(long_queue=False)
            while self.model.queue:
                worker = self._deliver(keep=False)
                if worker:
                    self._commit(worker, "answer", 1)
            self.calls_are_made()
        assert not self.model.pick(lambda run: not run.ended), "some runs are stuck"
        self.upkeep()
        for run in self.model.runs.values():
            check_as_clients_see_it(self.rig, run)
        self._create(f"r{len(self.model.runs)}", BATCHES[0], 0, delayed=False)
        self.upkeep()  # a batch that has begun anew: nothing of it expires

    def _run(self, pick: int) -> Run:
        runs = list(self.model.runs.values())
        return runs[pick % len(runs)]

    def _worker(self, pick: int) -> Worker:
        """Return a worker; the newest ones are chosen more often."""
        recent = self.workers[-4:] if pick < OFTEN else self.workers
        return recent[pick % len(recent)]
