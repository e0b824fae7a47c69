"""Runs that begin behind others under hypothesis: looked at, told of ends, begun or ended.

The product's own loop looks at them. Each of its calls of the store is compared with the model, and
it may stall before any of them, while whatever else happens.
"""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from support.protocol.audit import Dump
from support.protocol.dependent_model import BEGINNING, DependentModel
from support.protocol.linked import CUT, LinkedMachine, LinksAlone, owes_others, plain
from support.protocol.linked_model import Address
from support.protocol.looks import Look
from support.protocol.model import GRACE, Run
from support.protocol.rig import Rig
from support.protocol.worker import AGENTS, KINDS, Worker

from stepfleet.orchestrator import Message
from stepfleet.orchestrator.records.calls.answers import After
from stepfleet.orchestrator.store.lua import run_script
from stepfleet.orchestrator.store.runs.submission import NewRun
from stepfleet.worker.runtime.links import DependentRuns

MOST_WITH_DEPENDENTS = 7
NEVER_THERE = "nobody"
ALL, NONE = " ", ""
PICK = st.integers(0, 63)
SIZE = st.integers(1, 9)
DECIDES = 2
"""By then it has asked for ends and looked whether all have come, if it was told of them before."""
STALL = st.sampled_from([None, None, None, 0, 1, 1, DECIDES, DECIDES, DECIDES, 3, 4])
MEANWHILE = st.sampled_from(
    [
        *("", "look", "look", "retry", "retry and look", "retry and look", "end again"),
        *("work", "work", "pause", "cancel", "renew", "purge"),
    ]
)


class DependentMachine(LinkedMachine):
    """Everything that linked runs do, and runs that wait for others before they begin."""

    model: DependentModel

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.model = DependentModel()
        self.looks: list[Look] = []
        self.created = 0
        self.dependents = DependentRuns(rig.bench.opened)

    # ------------------------------------------------------------------------------ submission

    @precondition(lambda self: self.model.runs and self._has_room())
    @rule(
        picks=st.lists(PICK, min_size=1, max_size=3),
        stops=st.booleans(),
        batch=st.sampled_from(["b0", "", ""]),
        missing=st.sampled_from([False] * 7 + [True]),
    )
    def submit_behind(self, picks: list[int], stops: bool, batch: str, missing: bool) -> None:
        """A run behind others, whatever these are doing: active, ended in any way, or removed."""
        runs = list(self.model.runs)
        after = [runs[pick % len(runs)] for pick in picks] + [NEVER_THERE] * missing
        self.created += 1
        run_id = f"w{self.created}"
        record = After(
            runs={f"n{at}": one for at, one in enumerate(after)},
            text="{outputs}",
            failed="stop" if stops else "run",
        )
        new = NewRun(
            run_id,
            AGENTS[0].name,
            self.rig.configs[0],
            (Message.user("{outputs}"),),
            4,
            batch_id=batch,
            after=record,
        )
        with self.operation("create behind"):
            assert self.rig.do(self.rig.bench.submission.create(new))
            self.model.create_behind(run_id, batch, after, stops=stops)
            self.rig.do(self.rig.bench.submission.publish([new]))
        if len(picks) > 1:  # its first message is quick
            self._claim(run_id, 0)

    def _has_room(self) -> bool:
        return len(self.model.runs) < MOST_WITH_DEPENDENTS

    # ---------------------------------------------------------------------------- looking at it

    @precondition(lambda self: self._behind())
    @rule(pick=PICK, stall=STALL, meanwhile=MEANWHILE, size=SIZE, goes_on=st.booleans())
    def run_is_looked_at(
        self, pick: int, stall: int | None, meanwhile: str, size: int, goes_on: bool
    ) -> None:
        """A worker looks at it, and stalls perhaps: it goes on behind what happens meanwhile."""
        waiting = self._behind()
        run = waiting[pick % len(waiting)]
        self.look_at(run, stall)
        if not self.looks or self.looks[-1].run_id != run.run_id:
            return
        self._happens(run, meanwhile, pick, size)
        if goes_on and self.looks:
            self.look_goes_on(0)

    @precondition(lambda self: self.looks)
    @rule(pick=PICK)
    def look_goes_on(self, pick: int) -> None:
        """A worker that had stalled goes on."""
        if not self.looks:
            return
        look = self.looks.pop(-1 - pick % len(self.looks))
        self.rig.do(look.goes_on())

    def look_at(self, run: Run, stall: int | None = None) -> None:
        """Have the product's loop look at a run; `stall`: before which of its calls it stalls."""
        look = Look(self, run.run_id, stall)
        self.rig.do(look.begins())
        if look.is_stalled:
            self.looks.append(look)

    def _happens(self, run: Run, what: str, pick: int, size: int) -> None:
        before = [self.model.runs[one] for one in run.after if one in self.model.runs]
        one = before[pick % len(before)] if before else None
        if what in {"pause", "cancel"}:
            self._control(run, what)
            self._control(run, "resume")
        elif what == "renew":
            self._control(run, "cancel")
            self.ask(run, "retry")
        elif what == "look":
            self.look_at(run)
        elif one is None:
            return
        elif what in {"retry", "retry and look", "end again"} and one.ended:
            self.ask(one, "retry")
            if what == "retry and look":
                self.look_at(run)
            elif what == "end again":
                self._works(one, "answer" if size % 2 else "broken", size, "")
        elif what == "work" and not one.ended:
            self._works(one, "broken" if size % 3 == 0 else "answer", size, "")
        elif what == "purge" and self._may_go(one):
            self._remove(one)

    def _behind(self) -> list[Run]:
        return self.model.pick(lambda run: bool(run.after) and not run.ended)

    # ----------------------------------------------------------------------- what it waits for

    @precondition(lambda self: self._before(ended=False))
    @rule(
        pick=PICK, kind=st.sampled_from(["answer", "answer", "broken", *KINDS]), cut=CUT, size=SIZE
    )
    def run_before_works(self, pick: int, kind: str, cut: str, size: int) -> None:
        """A run that others wait for does its next step; its end is told to them."""
        before = self._before(ended=False)
        self._works(before[pick % len(before)], kind, size, cut)

    @precondition(lambda self: self._behind())
    @rule(
        pick=PICK,
        kind=st.sampled_from(["answer", "answer", "broken", "error"]),
        again=st.sampled_from(["", "", "retry", "end again", "purge"]),
        stall=STALL,
        meanwhile=MEANWHILE,
        size=SIZE,
    )
    def all_before_it_end(
        self, pick: int, kind: str, again: str, stall: int | None, meanwhile: str, size: int
    ) -> None:
        """One after the other; one of them goes on, perhaps, before a worker looks."""
        waiting = self._behind()
        run = waiting[pick % len(waiting)]
        self._end_before(run, kind, size)
        self._happens(run, again, pick, size)
        if run.after and not run.ended:
            self.look_at(run, stall)
        if self.looks and self.looks[-1].run_id == run.run_id:
            self._happens(run, meanwhile, pick, size)
            self.look_goes_on(0)

    @precondition(lambda self: self._behind())
    @rule(pick=PICK, again=st.sampled_from(["", "retry", "end again"]), size=SIZE)
    def two_look_at_once(self, pick: int, again: str, size: int) -> None:
        """Both find that all have ended, or that one goes on, and do the same about it."""
        waiting = self._behind()
        run = waiting[pick % len(waiting)]
        self._end_before(run, "answer", size)
        self._happens(run, again, pick, size)
        if not run.after or run.ended:
            return
        self.look_at(run, DECIDES)
        self.look_at(run)
        if self.looks:
            self.look_goes_on(0)

    def _end_before(self, run: Run, kind: str, size: int) -> None:
        for one in run.after:
            before = self.model.runs.get(one)
            if before and not before.ended and not before.after:
                self._works(before, kind, size, "")

    @precondition(lambda self: self._before(ended=True))
    @rule(pick=PICK, late=st.booleans(), size=SIZE)
    def run_before_is_retried(self, pick: int, late: bool, size: int) -> None:
        """It goes on before others have begun; whoever was telling them of its end stalls."""
        before = self._before(ended=True)
        run = before[pick % len(before)]
        if late and run.returns:
            self.settle(run, "half")
        self.ask(run, "retry")
        if late and self.unsettled:
            self.debt_is_settled_late(0)
        if size % 2:
            self._works(run, "answer", size, "")

    @precondition(lambda self: self.model.pick(lambda run: not run.batch))
    @rule(pick=PICK)
    def run_is_removed(self, pick: int) -> None:
        """Somebody purges a run, cancelled a moment ago perhaps: first others learn of its end."""
        able = self.model.pick(lambda run: not run.batch)
        run = able[pick % len(able)]
        self._control(run, "cancel")
        if self._may_go(run) and not self._remove(run):
            self.settle(run, "")
            assert self._remove(run)

    @precondition(lambda self: self._behind())
    @rule(pick=PICK, word=st.sampled_from(["pause", "cancel"]), then=PICK, size=SIZE)
    def waiting_run_goes_on_later(self, pick: int, word: str, then: int, size: int) -> None:
        """It is paused or cancelled while a run before it ends, and taken up again."""
        waiting = self._behind()
        run = waiting[pick % len(waiting)]
        if size % 2:
            self.look_at(run)
        self._control(run, word)
        before = [self.model.runs[one] for one in run.after if one in self.model.runs]
        active = [one for one in before if not one.ended]
        if active:
            self._works(active[then % len(active)], "answer", size, "")
        if size % 3:
            self.ask(run, "retry" if run.ended else "resume")

    def _works(self, run: Run, kind: str, size: int, cut: str) -> None:
        worker = self._claim(run.run_id, run.step)
        if worker:
            self._commit(worker, kind, size)
        if run.ended and run.returns:
            self.settle(run, cut)

    def _before(self, *, ended: bool) -> list[Run]:
        wanted = {one for run in self._behind() for one in run.after}
        return self.model.pick(lambda run: run.run_id in wanted and run.ended == ended)

    def _may_go(self, run: Run) -> bool:
        """Of a batch, counters stay; of calls, whatever looks after them."""
        is_plain = not run.batch and "." not in run.run_id and not run.calls
        return run.ended and is_plain and run.run_id not in self.model.out

    def _remove(self, run: Run) -> bool:
        """Purge a run, unless it owes its end; nobody who had to do with it does anything more."""
        gone, opened = run.run_id, self.rig.bench.opened
        shard = opened.keys.shard_of(gone)
        keys = [opened.keys.run(gone), opened.keys.due(shard)]
        asked_at = self.rig.do(opened.connection.now()).timestamp() * 1000 + GRACE
        with self.operation("purge"):
            purge = run_script(
                opened.connection, "purge", keys, gone, ALL, round(asked_at), NONE, NONE
            )
            owes = owes_others(run)
            assert int(self.rig.do(purge)) == (-1 if owes else 1)
            if owes:
                return False
            self.model.remove(gone)
        self.workers = [one for one in self.workers if one.claim.run_id != gone]
        self.makers = [one for one in self.makers if one.taken.hint.run_id != gone]
        self.attendants = [one for one in self.attendants if one.taken.hint.run_id != gone]
        self.seen = [one for one in self.seen if one[0].run_id != gone]
        self.unsettled = [one for one in self.unsettled if one[0] != gone]
        self.asked = [one for one in self.asked if one.args[0].run_id != gone]  # type: ignore[attr-defined]
        return True

    def _claim(self, run_id: str, step: int, token: str = "") -> Worker | None:
        worker = super()._claim(run_id, step, token)
        run = self.model.runs.get(run_id)
        if worker is None and run and run.after and run.status in {"queued", "in_progress"}:
            self.look_at(run)
        return worker

    def _tell(self, address: Address, run: Run) -> None:
        if address[1] != BEGINNING:
            super()._tell(address, run)
            return
        agent = AGENTS[0].name
        with self.operation("tell of an end"):
            self.rig.do(self.dependents.waiting.arrived(address[2], run.run_id, agent))
            self.model.arrived(address[2], run.run_id)

    # ----------------------------------------------------------------------------------- checks

    def check(self, dump: Dump) -> None:
        super().check(dump)
        for run_id, run in self.model.runs.items():
            header = dump.runs[run_id].header
            assert ("after" in header) == bool(run.after), f"{run_id}: waits for others"
            if run.after:
                ahead = int(header["ahead"])
                assert ahead == len(self.model.ahead(run)), f"{run_id} waits for {ahead} runs"
                assert (run.token, run.log) == ("", []), f"{run_id} has begun"
            for before in run.following & self.model.runs.keys() if not run.ended else ():
                is_owed = f"0 {BEGINNING} {run_id}" in dump.runs[before].followers
                assert is_owed, f"{run_id} waits for {before}, which does not know it"

    def teardown(self) -> None:
        """Workers that stall at the end are lost."""
        for look in self.looks:
            self.rig.do(look.is_lost())
        super().teardown()


class DependentsAlone(DependentMachine, LinksAlone):
    """The same without most of what has no part in this kind of waiting."""


for _name in (
    *("step_waits", "call_is_attended", "time_limit_is_over", "attendant_comes_late"),
    *("person_answers", "asks_are_read", "parent_is_asked", "child_works", "parent_is_retried"),
    *("call_is_taken", "owing_run_is_retried", "tried_in_company", "call_is_delivered"),
    *("cancelled_wait_goes_on", "wake"),
):
    setattr(DependentsAlone, _name, plain(getattr(DependentMachine, _name)))
