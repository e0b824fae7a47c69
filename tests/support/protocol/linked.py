"""Runs that wait for runs and people under hypothesis: asked, answered, followed, settled.

A worker that is lost in between is one whose next operation does not come, or comes late.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from support.protocol.audit import Dump
from support.protocol.calls import Maker
from support.protocol.linked_model import (
    APPROVAL,
    BY_PEOPLE,
    DECISIONS,
    END,
    PERSON,
    RUN,
    LinkedModel,
    Owes,
)
from support.protocol.machine import LONG, ROUNDS_TO_THE_END, ProtocolMachine
from support.protocol.model import GRACE, Run
from support.protocol.rig import Rig
from support.protocol.worker import CALLS, KINDS, Worker

from stepfleet.orchestrator import Message
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.attempt import Wait
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.protocol.waiting import answered, decided_event, wait_key
from stepfleet.orchestrator.records.calls.answers import Answer, Decision
from stepfleet.orchestrator.records.calls.tools import ToolCall
from stepfleet.orchestrator.store.runs.links import Owed
from stepfleet.orchestrator.store.runs.submission import NewRun
from stepfleet.worker.runtime.links import run_end

LIMIT = 400_000
FAR = 3_600_000
MOST_LINKED = 8
STEP_HINT = 2
STARTED = datetime(2026, 1, 1, tzinfo=UTC)
PICK = st.integers(0, 63)
SIZE = st.integers(1, 9)
PLACE = st.sampled_from([RUN, RUN, RUN, APPROVAL, PERSON, "heavy"])
CUT = st.sampled_from(["", "", "", "begun", "half", "page"])


class LinkedMachine(ProtocolMachine):
    """Everything that the protocol does, and links between its runs."""

    model: LinkedModel

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.model = LinkedModel()
        self.plans: dict[tuple[str, int], dict[int, Wait]] = {}
        self.attendants: list[Maker] = []
        self.unsettled: list[tuple[str, Owed, Owes]] = []
        opened = rig.bench.opened
        self.links = opened.links
        self.asked_people = opened.approvals

    # ------------------------------------------------------------------------- steps that wait

    @precondition(lambda self: self.model.queue)
    @rule(
        places=st.tuples(PLACE, PLACE),
        within=st.sampled_from([None, LIMIT]),
        meanwhile=st.sampled_from(["", "", "", "cancel", "pause"]),
        then=st.sampled_from(["attend", "attend", "", "answer"]),
        size=SIZE,
    )
    def step_waits(
        self, places: tuple[str, str], within: int | None, meanwhile: str, then: str, size: int
    ) -> None:
        """A step comes as far as calls that wait for others."""
        worker = self._deliver(keep=False)
        if worker is None:
            return
        run = self.model.runs[worker.claim.run_id]
        self._plan(run, places, within)
        worker.places |= self._places_of(worker)
        if "response" not in run.journal:
            self.note(worker, size)
        if meanwhile:
            self.ask(run, meanwhile)
        self.park(worker, "park", size)
        for index in run.awaited if then == "attend" and run.is_waiting else ():
            self.attend(run, index, "")
        if then == "answer" and run.is_waiting:
            self.person_answers(0, how="right", index=size, approved=size % 2 == 0)

    def _plan(self, run: Run, places: tuple[str, str], within: int | None) -> None:
        plan = self.plans.setdefault((run.run_id, run.step), {})
        if plan or run.calls or run.run_id.count(".") > 1:
            return
        for index in range(CALLS):
            call = ToolCall(id=f"c{index}", name="look", arguments={})
            if places[index] != "heavy":
                key = wait_key(run.run_id, run.step, index, call)
                limit = None if within is None else within / 1000
                plan[index] = Wait(index, places[index], "look", key, limit)

    def _places_of(self, worker: Worker) -> dict[int, Wait]:
        """Return what the calls of a worker's step wait for; an approved one is made."""
        claim = worker.claim
        plan = self.plans.setdefault((claim.run_id, claim.step), {})
        return {index: wait for index, wait in plan.items() if index not in claim.journal.answers}

    def _claim(self, run_id: str, step: int, token: str = "") -> Worker | None:
        run = self.model.runs.get(run_id)
        worker = super()._claim(run_id, step, token)
        if worker:
            assert run is not None
            given = worker.claim.journal.answers
            texts = {name[2:]: text for name, text in run.journal.items() if name[:2] == "a:"}
            assert sorted(map(str, given)) == sorted(texts), f"answers of {run_id}: {given}"
            for index, answer in given.items():
                call = ToolCall(id=f"c{index}", name="look", arguments={})
                record = answered(call, answer, worker.claim.now)
                if record and index not in worker.claim.journal.results:
                    worker.claim.journal.results[index] = record
            worker.places |= self._places_of(worker)
        elif run and run.ended and run.due is not None and run.due > self.model.now:
            self.settle(run, "")
        return worker

    def _deliver(self, *, keep: bool) -> Worker | None:
        if len(self.model.queue[-1]) == STEP_HINT:
            return super()._deliver(keep=keep)
        with self.operation("deliver"):
            expected: Any = self.model.queue[-1] if keep else self.model.queue.pop()
            assert self.rig.auditor.take_message(keep=keep) == expected
        self._attend(*expected, cut="")
        return None

    # ----------------------------------------------------------------- who looks after the calls

    @precondition(lambda self: self._waiting_for({RUN, APPROVAL, PERSON}))
    @rule(pick=PICK, cut=CUT)
    def call_is_attended(self, pick: int, cut: str) -> None:
        """A worker looks after a call: at its message, or when the rescuer sends one."""
        waits = self._waiting_for({RUN, APPROVAL, PERSON})
        run, index = waits[pick % len(waits)]
        self.attend(run, index, cut)

    @precondition(lambda self: self._waiting_for(BY_PEOPLE))
    @rule(pick=PICK, late=st.booleans())
    def time_limit_is_over(self, pick: int, late: bool) -> None:
        """Nobody has decided: the default does, or a person is faster than the worker."""
        waits = self._waiting_for(BY_PEOPLE)
        run, index = waits[pick % len(waits)]
        self.clock_jumps(LIMIT)
        if late:
            self._answer(run, run.step, index, run.journal[f"k:{index}"], "late")
        if index in run.open_calls:
            self.attend(run, index, "")

    def take(self, run_id: str, step: int, index: int, token: str = "") -> Maker | None:
        before = len(self.makers)
        maker = super().take(run_id, step, index, token)
        call = self.model.runs[run_id].calls.get(index)
        if maker is None or call is None or not call.place:
            return maker
        assert (maker.taken.place, maker.taken.key) == (
            call.place,
            self.model.runs[run_id].journal[f"k:{index}"],
        )
        if len(self.makers) > before:
            self.attendants.append(self.makers.pop())
        return None

    def attend(self, run: Run, index: int, cut: str) -> None:
        """Look after a call; `cut` says where its worker is lost."""
        self._attend(run.run_id, run.step, index, cut=cut)

    def _attend(self, run_id: str, step: int, index: int, *, cut: str) -> None:
        before = len(self.attendants)
        self.take(run_id, step, index)
        if len(self.attendants) == before or cut == "begun":
            return
        maker = self.attendants[-1]
        run, call = self.model.runs[run_id], self.model.runs[run_id].calls[index]
        delay = FAR
        if call.place == RUN:
            self._look_after_run(run, maker, cut)
        elif call.till <= self.model.now:
            self._answer(run, step, index, maker.taken.key, "by default")
        else:
            delay = call.till - self.model.now
        if not cut:
            self.call_is_left_by(maker, started=False, delay=delay)

    @precondition(lambda self: self.attendants)
    @rule(pick=PICK, kept=st.booleans())
    def attendant_comes_late(self, pick: int, kept: bool) -> None:
        """One that had stalled renews its lease, or gives the call back."""
        maker = self.attendants[-1 - pick % min(len(self.attendants), 4)]
        if kept:
            self.call_is_kept_by(maker)
        else:
            self.call_is_left_by(maker, started=False, delay=FAR)

    def _look_after_run(self, run: Run, maker: Maker, cut: str) -> None:
        hint, child = maker.taken.hint, self.model.runs.get(maker.taken.key)
        address = (hint.step, maker.taken.index, hint.run_id)
        if child is None:
            self._create_child(maker, address)
        elif child.ended and child.returns:
            self.settle(child, cut)
        elif child.ended and child.status != "completed":
            stored = self.rig.do(self.rig.bench.stored(child.run_id))
            self._retry(stored, child.seq, raised=True)
            self._follow(child, address)
        elif child.ended:
            self._answer(run, *address[:2], child.run_id, "end")
        else:
            self._follow(child, address)
        child = self.model.runs[maker.taken.key]
        if not cut and not child.ended and run.ended:
            self._control(child, "cancel")
        elif not cut and not child.ended and run.status == "paused":
            self._control(child, "pause")

    def _create_child(self, maker: Maker, address: tuple[int, int, str]) -> None:
        run_id, hint = maker.taken.key, maker.taken.hint
        new = NewRun(
            run_id,
            maker.taken.config.name,
            self.rig.configs[0],
            (Message.user("look"),),
            4,
            parent=hint.run_id,
            returns_to=hint,
        )
        with self.operation("create child"):
            assert self.rig.do(self.rig.bench.submission.create(new))
            assert self.model.create(run_id, "", 0)
            assert self.model.follow(run_id, address) == "followed"
            self.rig.do(self.rig.bench.submission.publish([new]))
        self._is_followed(address)

    def _follow(self, child: Run, address: tuple[int, int, str]) -> None:
        with self.operation("follow"):
            expected = self.model.follow(child.run_id, address)
            hint = Work(address[2], address[0], address[1])
            status = self.rig.do(self.links.follow(child.run_id, hint))
            assert ("followed" if status is None else "ended") == expected
        if expected == "followed":
            self._is_followed(address)

    def _is_followed(self, address: tuple[int, int, str]) -> None:
        run = self.model.runs[address[2]]
        if run.step == address[0] and self.model.waits(run, address[1]):
            run.calls[address[1]].follows = True

    # ---------------------------------------------------------------------- answers and debts

    @precondition(lambda self: self.model.asks)
    @rule(
        pick=PICK,
        how=st.sampled_from(["right", "right", "wrong", "twice"]),
        index=PICK,
        approved=st.booleans(),
    )
    def person_answers(self, pick: int, how: str, index: int, approved: bool) -> None:
        """A person decides about a call of the index: once, twice, or about another call."""
        asks = sorted(self.model.asks)
        if not asks:
            return
        run_id, step, place = asks[(pick + index) % len(asks)]
        run = self.model.runs[run_id]
        key = wait_key(run_id, step, place, ToolCall(id=f"c{place}", name="look", arguments={}))
        word = "yes" if approved else "no"
        self._answer(run, step, place, f"{key}x" if how == "wrong" else key, word)
        if how == "twice":
            self._answer(run, step, place, key, "no" if approved else "yes")

    @precondition(lambda self: self.model.asks)
    @rule()
    def asks_are_read(self) -> None:
        """The list of what waits for people, which drops the rest."""
        with self.operation("asks"):
            page, more = self.rig.do(self.asked_people.page(50, None))
            told = {(one.ask.run_id, one.ask.step - 1, one.ask.index) for one in page}
            assert more is None
            assert told == self.model.visible_asks()

    def _answer(self, run: Run, step: int, index: int, key: str, word: str) -> None:
        hint = Work(run.run_id, step, index)
        call = ToolCall(id=f"c{index}", name="look")
        events: list[Any] = []
        if word == "end":
            child = self.model.runs[key]
            result = self.rig.do(self.rig.bench.runs.get(key)).result()
            end = run_end(result)
            assert round(end.total_cost_usd * 4) == self.model.cost_of(child.run_id)
            answer, text = Answer(run=end), f'{END}{end.status}"'
        else:
            is_question = index in run.calls and run.calls[index].place == PERSON
            reply = f"answer of {word}" if is_question else None
            given = Decision(
                approved=word != "no", by=word, text=reply, by_default=word not in DECISIONS
            )
            answer, text = Answer(decision=given), word
            events = [decided_event(hint, 1, call, given, STARTED)]
        with self.operation("answer"):
            expected = self.model.answer(run.run_id, step, index, key, text, len(events))
            reply_ = self.rig.do(
                self.rig.bench.steps.calls.answer(hint, key, answer, "", Events(events))
            )
            told = "delivered" if reply_.applied else "before" if reply_.first else "lost"
            assert told == expected, f"answer to {hint}: {told}, expected {expected}"

    @precondition(lambda self: self.model.pick(owes_others))
    @rule(pick=PICK, cut=CUT)
    def debts_are_settled(self, pick: int, cut: str) -> None:
        """A worker tells others of a run's end, or of a request to it."""
        owing = self.model.pick(owes_others)
        self.settle(owing[pick % len(owing)], cut)

    @precondition(lambda self: self.unsettled)
    @rule(pick=PICK)
    def debt_is_settled_late(self, pick: int) -> None:
        """A worker had stalled behind what it has told others of."""
        self._settled(*self.unsettled[-1 - pick % min(len(self.unsettled), 4)])

    def settle(self, run: Run, cut: str) -> None:
        """Settle what a run owes; `cut` says where the worker is lost, or stalls."""
        owed = self.rig.do(self.links.owed(run.run_id))
        owes = self.model.owed(run.run_id)
        calls = sorted((one.step, one.index or 0, one.run_id) for one in owed.calls)
        told = Owes(frozenset(calls), owed.request or "", frozenset(owed.runs), owed.seen)
        assert told == owes, f"{run.run_id} owes {told}, expected {owes}"
        if cut == "begun":
            return
        if cut == "page" and calls:
            step, index, caller = calls[0]
            owed = replace(owed, calls=(Work(caller, step, index),))
            owes = replace(owes, calls=frozenset(calls[:1]))
        for child in sorted(owes.runs & self.model.runs.keys()):
            self._control(self.model.runs[child], owes.request)
        for address in sorted(owes.calls):
            self._tell(address, run)
        if cut == "half":
            self.unsettled.append((run.run_id, owed, owes))
        else:
            self._settled(run.run_id, owed, owes)

    def _tell(self, address: tuple[int, int, str], run: Run) -> None:
        step, index, caller = address
        self._answer(self.model.runs[caller], step, index, run.run_id, "end")

    def _settled(self, run_id: str, owed: Owed, owes: Owes) -> None:
        with self.operation("settled"):
            left = self.rig.do(self.links.settled(run_id, owed))
            assert left == self.model.settled(run_id, owes)

    # ------------------------------------------------------------------ a parent and its children

    @precondition(lambda self: self._waiting_for({RUN}))
    @rule(
        pick=PICK,
        word=st.sampled_from(["pause", "pause", "cancel"]),
        then=st.sampled_from(["", "resume", "retry", "settle", "late"]),
    )
    def parent_is_asked(self, pick: int, word: str, then: str) -> None:
        """A cancel or pause of a waiting run reaches those below; perhaps it goes on before."""
        waits = self._waiting_for({RUN})
        run, _ = waits[pick % len(waits)]
        self._control(run, word)
        if then == "late" and owes_others(run):
            self.settle(run, "half")
            self._control(run, "resume")
            self._control(run, "cancel" if pick % 2 else "pause")
            self.debt_is_settled_late(0)
        elif then == "settle" and owes_others(run):
            self.settle(run, "")
        elif then == "retry" and run.ended:
            self.ask(run, "retry")
        elif then == "resume":
            self._control(run, "resume")

    @precondition(lambda self: self._children())
    @rule(pick=PICK, kind=st.sampled_from(["answer", "answer", "broken", "error", *KINDS]), cut=CUT)
    def child_works(self, pick: int, kind: str, cut: str) -> None:
        """A run that a call has started does its next step; its end is told to its caller."""
        children = self._children()
        child = children[pick % len(children)]
        worker = self._claim(child.run_id, child.step)
        if worker:
            self._commit(worker, kind, 1 + pick % 9)
        if child.ended and child.returns:
            self.settle(child, cut)

    @precondition(lambda self: self.model.pick(lambda run: run.ended and run.returns))
    @rule(pick=PICK, late=st.booleans())
    def owing_run_is_retried(self, pick: int, late: bool) -> None:
        """A run goes on before its end was told; whoever was telling it stalls."""
        owing = self.model.pick(lambda run: run.ended and run.returns)
        run = owing[pick % len(owing)]
        if late:
            self.settle(run, "half")
        self.ask(run, "retry")
        if late:
            self.debt_is_settled_late(0)

    @precondition(lambda self: self.model.pick(_is_ended_parent))
    @rule(pick=PICK, size=SIZE)
    def parent_is_retried(self, pick: int, size: int) -> None:
        """It waits once more for what has no answer; what ended well is not repeated."""
        parents = self.model.pick(_is_ended_parent)
        run = parents[pick % len(parents)]
        self.ask(run, "retry")
        worker = self._claim(run.run_id, run.step)
        if worker is None:
            return
        self.park(worker, "park", size)
        for index in run.awaited if run.is_waiting else ():
            if run.calls[index].place:
                self.attend(run, index, "")

    def _children(self) -> list[Run]:
        return self.model.pick(lambda run: "." in run.run_id and not run.ended)

    def _waiting_for(self, places: Any) -> list[tuple[Run, int]]:
        if len(self.model.runs) > MOST_LINKED:
            return []
        return [
            (run, index)
            for run in self.model.pick(lambda run: run.is_waiting)
            for index in run.awaited
            if run.calls[index].place in places
        ]

    # ----------------------------------------------------------------- the rescuer, and the end

    @precondition(lambda self: self.model.runs)
    @rule(long_queue=st.booleans())
    def rescue(self, long_queue: bool) -> None:
        with self.operation("rescue"):
            calls: list[Any] = self.model.rescue_calls()
            linked = [one for one in calls if self.model.runs[one[0]].calls[one[2]].place]
            heavy = [one for one in calls if one not in linked]
            expected, at_the_end = self.model.rescue(long_queue=long_queue)
            count = self.rig.do(self.rig.rescuer(long_queue=long_queue).rescue()) - len(heavy)
            self.calls_are_dispatched_again(heavy)
            ahead = max(count - len(at_the_end), 0)
            told, behind = self.rig.auditor.newest_at_both_ends(ahead, count - ahead)
            assert sorted(told) == sorted([*expected, *linked])
            assert sorted(behind) == sorted(at_the_end)
            self.model.queue = behind + self.model.queue + told

    def check(self, dump: Dump) -> None:
        """Assert what holds of links between runs."""
        assert dump.asks == {f"{step} {index} {run}" for run, step, index in self.model.asks}
        for run_id, run in self.model.runs.items():
            raw = dump.runs[run_id]
            there = {f"{step} {index} {caller}" for step, index, caller in run.followers}
            assert set(raw.followers) == there, f"{run_id}: followers"
            for index in run.awaited:
                call = run.calls[index]
                if not call.place:
                    continue
                late = (call.till - self.model.now) - (int(raw.journal[f"t:{index}"]) - dump.now)
                assert 0 <= late < GRACE, f"{run_id}: the time limit of {index}"
                assert f"a:{index}" not in raw.journal, f"{run_id}: waits, though answered"
                if call.follows and self.model.waits(run, index):
                    child = self.model.runs[run.journal[f"k:{index}"]]
                    is_owed = (run.step, index, run_id) in child.followers
                    assert is_owed, f"{run_id} waits for {child.run_id}, which does not know it"

    def teardown(self) -> None:
        super().teardown()
        if not self.sound:
            return
        for _ in range(ROUNDS_TO_THE_END):
            if not self.model.pick(lambda run: run.due is not None):
                break
            self.clock_jumps(LONG)
            self.rescue(long_queue=False)
            while self.model.queue:
                worker = self._deliver(keep=False)
                if worker:
                    self._commit(worker, "answer", 1)
            self.calls_are_made()
        assert not self.model.pick(lambda run: run.due is not None), "somebody still owes"
        for run in self.model.runs.values():
            result = self.rig.do(self.rig.bench.stored(run.run_id)).result()
            below = sum(step.below for step in run.log)
            assert round(result.below_cost_usd * 4) == below


def owes_others(run: Run) -> bool:
    """Tell whether a run's end, or a request to it, is still to reach others."""
    return bool(run.reach) or (run.ended and run.returns)


def _is_ended_parent(run: Run) -> bool:
    return run.ended and any(name[:2] == "k:" for name in run.journal)


class LinksAlone(LinkedMachine):
    """The same without most of what has no part in links: more of these in each example."""


def plain(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation as a method that is no rule."""

    def done(self: Any, *args: Any, **given: Any) -> Any:
        return operation(self, *args, **given)

    return done


for _name in (
    *("create_again", "hint_from_nowhere", "claim_again", "renew", "commit_again", "work"),
    *("broker_is_wiped", "message_is_lost", "runs_wait_in_a_long_queue", "wake", "journal"),
    *("step_parks", "tried_in_company", "call_is_tried_in_company", "upkeep", "commit"),
    *("waiting_call_is_tried_in_company", "one_call_is_lost_beside_a_held_one"),
    *("calls_are_worked_on", "call_from_nowhere", "tool_worker_stands_still"),
    *("tools_broker_is_wiped", "batch_is_asked", "batch_is_asked_of_a_held_run", "batch_is_held"),
    *("sweep", "request_is_over", "request_comes_late", "fleet_pauses", "lease_runs_out"),
    *("fleet_pauses_before_a_tool", "cancelled_owner_is_lost_in_a_paused_fleet", "ask_again"),
    *("retry_what_was_seen", "retry_comes_behind_another_end", "control_while_it_is_held"),
    *("call_is_kept", "call_is_left", "call_is_taken_again", "waiting_run_is_asked", "control"),
):
    setattr(LinksAlone, _name, plain(getattr(LinkedMachine, _name)))
