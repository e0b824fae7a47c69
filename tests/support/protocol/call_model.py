"""Steps that wait for tool calls, in the protocol's plain model: park, take, keep, leave, deliver.

Written from the design, not from the scripts; shares no code with the product and knows no Redis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from support.protocol.model import (
    GRACE,
    LEASE,
    MOST_DOUBLINGS,
    Call,
    Decision,
    Model,
    Run,
    know_better,
    take_back,
)

PATIENCE = 3_000_000
CallHint = tuple[str, int, int]


@dataclass(frozen=True)
class Park:
    """What a worker parks with: the calls it waits for, and its time in half seconds.

    `waits` has place, key and time limit (ms) of those that wait for a run or a person.
    """

    indexes: Sequence[int]
    time: int
    waits: Mapping[int, tuple[str, str, int | None]] = field(default_factory=dict)


class WaitingModel(Model):
    """The model of everything: runs, and the calls that they wait for.

    `call_queue` is the tools' queue, its head at the right end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.call_queue: list[CallHint] = []

    def park(
        self, run_id: str, step: int, token: str, park: Park, decision: Decision
    ) -> tuple[str, str]:
        """Return ('committed' | 'lost', status) or ('wanted', 'cancel')."""
        run = self.runs[run_id]
        if token == run.last_token or token in run.committed:
            return "committed", run.status
        if run.token != token or run.step != step:
            take_back(run, token)
            run.ledger[token] = "late"
            return "lost", run.status
        if self.wanted(run) == "cancel" and not decision.knows_cancel:
            return "wanted", "cancel"
        waits = tuple(index for index in park.indexes if f"r:{index}" not in run.journal)
        for index in waits:
            self._begins_to_wait(run, index, park)
        run.journal |= {"began": "", "spent": "", "paid": ""}
        run.spent += park.time
        run.committed.add(token)
        run.token, run.last_token, run.dispatches = "", token, 0
        run.outage, run.parked = "", False
        run.seq += decision.events
        run.waiting, run.waits_at = waits, step
        run.not_before = self.now + PATIENCE if waits else 0
        if self.wanted(run) == "pause":
            self._pause(run)
        elif waits:
            self._arm(run)
        else:
            run.due = self.now
        return "committed", run.status

    def _begins_to_wait(self, run: Run, index: int, park: Park) -> None:
        call = run.calls.setdefault(index, Call())
        if call.look <= self.now:
            run.journal.pop(f"k:{index}", None)
            call.look, call.place = self.now + GRACE, ""
            if self.wanted(run) != "pause":
                self.call_queue.insert(0, (run.run_id, run.step, index))
        run.journal[f"n:{index}"] = ""

    def take(self, run_id: str, step: int, index: int, token: str) -> str:
        run = self.runs[run_id]
        refusal = self._no_call(run, step, index)
        if refusal:
            return refusal
        call = run.calls[index]
        if call.owner == token:
            return "taken"
        if (is_kept := self.is_kept(run)) or self.fleet_paused:
            if not (is_kept or call.owner):
                call.look = self.now
                self._arm(run)
            return "paused"
        if token in run.committed | run.dead:
            return "stale"
        if call.owner:
            if call.lease > self.now:
                return "leased"
            call.crashes += 1
            run.ledger[call.owner] = "crash"
            in_company = call.trial[0] == call.owner
            know_better(call, call.owner, f"p{call.trial[1]}" if in_company else "t")
            run.journal |= {f"c:{index}": "", f"x:{index}": ""}
        call.owner, call.lease, call.look = token, self.now + LEASE, self.now + LEASE
        # A worker that had the tool's code for itself may have marked it as started before.
        call.starts = int(run.journal.get(f"s:{index}", "0")) + 1
        run.journal |= {f"o:{index}": token, f"s:{index}": str(call.starts)}
        run.journal |= {f"l:{index}": "", f"e:{index}": "", f"w:{index}": ""}
        run.dispatches = 0
        self._arm(run)
        return "taken"

    def keep(self, run_id: str, step: int, index: int, token: str) -> bool:
        run = self.runs[run_id]
        call = self._owned(run, step, index, token)
        if call is None:
            take_back(run.calls.get(index, Call()), token)
            return False
        is_asked = call.look < call.lease
        call.lease = self.now + LEASE
        call.look = call.look if is_asked else call.lease
        self._arm_if_waiting(run, index)
        return True

    def leave(
        self, run_id: str, step: int, index: int, token: str, *, delay: int, started: bool
    ) -> None:
        run = self.runs[run_id]
        call = self._owned(run, step, index, token)
        if call is None:
            return
        later = self.now + delay
        call.owner = ""
        call.look = min(later, call.look) if call.look < call.lease else later
        run.journal |= {f"o:{index}": "", f"n:{index}": ""}
        if f"k:{index}" not in run.journal:
            run.committed.add(token)
        if started:
            run.ledger[token] = "interrupted"
        else:
            call.starts -= 1
            run.journal[f"s:{index}"] = str(call.starts)
            if not call.starts:
                del run.journal[f"s:{index}"]
        self._arm_if_waiting(run, index)

    def deliver(self, run_id: str, step: int, index: int, token: str, time: int) -> bool:
        """Return whether the run has the result, now or since an earlier delivery."""
        run = self.runs[run_id]
        if token in run.committed:
            return True
        waits = run.awaited
        answered = bool(run.token) and index in waits
        if self._owned(run, step, index, token) is None or answered:
            take_back(run.calls.get(index, Call()), token)
            run.ledger[token] = "late"
            return False
        run.journal[f"r:{index}"] = token
        run.spent += time
        run.committed.add(token)
        if run.token or not run.not_before or index not in waits:
            return True
        self._arrives(run, index)
        return True

    def _arrives(self, run: Run, index: int) -> None:
        run.waiting = tuple(one for one in run.awaited if one != index)
        if not run.waiting:
            run.not_before = run.dispatches = 0
        if run.status == "paused":
            return
        if run.waiting:
            self._arm(run)
        else:
            run.due = self.now + GRACE
            self.queue.append((run.run_id, run.step))

    def commit(self, run_id: str, step: int, token: str, decision: Decision) -> tuple[str, str]:
        answer = super().commit(run_id, step, token, decision)
        self._forget_calls(self.runs[run_id])
        return answer

    def cancel(self, run_id: str) -> str:
        run = self.runs[run_id]
        answer = super().cancel(run_id)
        if answer == "cancelled" and "paid" in run.journal:
            run.ledger["paid"] = "interrupted"
        return answer

    def resume(self, run_id: str, step_seen: int) -> str:
        run = self.runs[run_id]
        waits, patience = run.open_calls, run.not_before
        answer = super().resume(run_id, step_seen)
        if answer == "resumed" and waits:
            self.queue.pop()
            run.not_before, run.due = patience, self.now
            for index in waits:
                if not run.calls[index].owner:
                    run.calls[index].look = self.now
        return answer

    def retry(self, run_id: str, seq_seen: int) -> str:
        run = self.runs[run_id]
        before, taken_back = run.retries, bool(run.log and run.log[-1].failed)
        answer = super().retry(run_id, seq_seen)
        if answer != "retried":
            return answer
        run.waiting = ()
        for index, call in run.calls.items():
            call.crashes, call.losses, call.trial = 0, {}, ("", 0)
            run.journal.pop(f"c:{index}", None)
            run.journal.pop(f"x:{index}", None)
            run.journal.pop(f"y:{index}", None)
        if taken_back:
            run.calls, run.spent = {}, 0
        paid = run.ledger.pop("paid", None)
        if paid and taken_back:
            run.ledger.pop(f"open {before}", None)
            run.ledger[f"paid {before}"] = paid
        return answer

    def call_begins(self, run_id: str, step: int, index: int, token: str, group: int) -> bool:
        """A process for suspects begins the call; return whether it may."""
        run = self.runs[run_id]
        call = run.calls.get(index)
        if call is None or call.owner != token or run.step != step:
            return False
        call.trial = (token, group)
        run.journal[f"y:{index}"] = ""
        return True

    def call_died(self, run_id: str, step: int, index: int, token: str, group: int) -> None:
        """That process has died, as whoever started it tells."""
        run = self.runs[run_id]
        call = run.calls.get(index)
        if run.ended or run.step != step or call is None or f"r:{index}" in run.journal:
            return
        if call.owner != token:
            if token in call.losses:
                know_better(call, token, f"a{group}")
            return
        call.crashes += 1
        run.ledger[token] = "crash"
        know_better(call, token, f"a{group}")
        run.journal |= {f"c:{index}": "", f"x:{index}": "", f"o:{index}": ""}
        run.dead.add(token)
        call.owner, call.look = "", self.now
        self._arm_if_waiting(run, index)

    def rescue_calls(self) -> list[CallHint]:
        """Return the calls that are dispatched again; comes before `rescue`."""
        hints = []
        for run in self.pick(lambda run: run.is_waiting and run.not_before > self.now):
            if run.due is None or run.due > self.now or self.fleet_paused or self.is_kept(run):
                continue
            wait = GRACE * 2 ** min(run.dispatches, MOST_DOUBLINGS)
            run.dispatches += 1
            for index in run.awaited:
                if run.calls[index].look <= self.now:
                    run.calls[index].look = self.now + wait
                    hints.append((run.run_id, run.step, index))
            self._arm(run)
        return hints

    def _no_call(self, run: Run, step: int, index: int) -> str:
        if run.ended:
            return "ended"
        if run.status == "paused":
            return "paused"
        if step != run.step:
            return "stale" if step < run.step else "ahead"
        open_call = index in run.open_calls and f"r:{index}" not in run.journal
        return "" if open_call and "response" in run.journal else "stale"

    def _owned(self, run: Run, step: int, index: int, token: str) -> Call | None:
        call = run.calls.get(index)
        done = f"r:{index}" in run.journal
        if run.ended or run.step != step or call is None or call.owner != token or done:
            return None
        return call

    def _arm_if_waiting(self, run: Run, index: int) -> None:
        if run.is_waiting and index in run.open_calls:
            self._arm(run)

    def _arm(self, run: Run) -> None:
        looks = [run.calls[index].look for index in run.awaited]
        run.due = min([*looks, run.not_before])

    def _forget_calls(self, run: Run) -> None:
        if not run.journal:
            run.calls, run.spent = {}, 0
