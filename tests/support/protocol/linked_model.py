"""Calls that wait for other runs and people, in the protocol's plain model.

Written from the design, not from the scripts; shares no code with the product and knows no Redis.
"""

from dataclasses import dataclass

from support.protocol.call_model import PATIENCE, Park, WaitingModel
from support.protocol.model import GRACE, MOST_DOUBLINGS, Call, Decision, Hint, Run

RUN, APPROVAL, PERSON = "@run", "@approval", "@person"
BY_PEOPLE = frozenset({APPROVAL, PERSON})
DECISIONS = frozenset({"yes", "no", "late"})
"""Those of people; others are made where a time limit is over."""
END, COMPLETED = '"status":"', '"status":"completed"'
"""Begins what stands in an answer that is a run's end; that of one which completed."""
Address = tuple[int, int, str]


@dataclass(frozen=True)
class Owes:
    """What a run owes at one moment: its end to `calls`, `request` to `runs`."""

    calls: frozenset[Address]
    request: str
    runs: frozenset[str]
    seen: int


class LinkedModel(WaitingModel):
    """The model of everything, with links between runs.

    `asks` is the index of calls that wait for people. The queue of steps has their hints, and those
    of calls that no tool's worker makes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asks: set[tuple[str, int, int]] = set()

    def waits(self, run: Run, index: int) -> bool:
        """Return whether an answer to that call would count now."""
        return not run.ended and index in run.open_calls and bool(run.calls[index].place)

    def visible_asks(self) -> set[tuple[str, int, int]]:
        """Drop what waits no more from the index, and return the rest."""
        self.asks = {
            (run_id, step, index)
            for run_id, step, index in self.asks
            if not self.runs[run_id].ended
            and self.runs[run_id].step == step
            and index in self.runs[run_id].awaited
            and self.runs[run_id].calls[index].place in BY_PEOPLE
        }
        return self.asks

    def answer(self, run_id: str, step: int, index: int, key: str, text: str, events: int) -> str:
        """Return 'delivered', 'before' (it has one already) or 'lost'."""
        run = self.runs[run_id]
        mine = run.step == step and run.journal.get(f"k:{index}") == key
        if mine and f"a:{index}" in run.journal:
            return "before"
        if not mine or not self.waits(run, index):
            return "lost"
        till = min(run.calls[index].till, run.not_before)
        if text in DECISIONS and run.status != "paused" and self.now >= till:
            return "lost"
        for name in "ntolscxyew":
            run.journal.pop(f"{name}:{index}", None)
        run.journal[f"a:{index}"] = text
        run.calls[index] = Call()
        self.asks.discard((run_id, step, index))
        run.seq += events
        self._arrives(run, index)
        return "delivered"

    def follow(self, run_id: str, address: Address) -> str:
        """Have a run's end sent to a call: 'followed' or 'ended'."""
        run = self.runs[run_id]
        if run.ended:
            return "ended"
        run.followers.add(address)
        run.returns = True
        return "followed"

    def owed(self, run_id: str) -> Owes:
        """Return what a run owes to others."""
        run = self.runs[run_id]
        calls = run.followers if run.ended and run.returns else ()
        below = frozenset(self._below(run) if run.reach else ())
        return Owes(frozenset(calls), run.reach, run.orphans or below, run.seq)

    def commit(self, run_id: str, step: int, token: str, decision: Decision) -> tuple[str, str]:
        run = self.runs[run_id]
        below, was_open = self._below(run), not run.ended
        reply = super().commit(run_id, step, token, decision)
        if was_open and run.ended and decision.step and below:
            run.reach, run.orphans = "cancel", frozenset(below)
            run.dispatches, run.due = 0, self.now
        return reply

    def _below(self, run: Run) -> list[str]:
        """Return the runs that its open step waits for."""
        calls = [one for one in run.awaited if run.calls[one].place == RUN]
        return [run.journal[f"k:{one}"] for one in calls]

    def settled(self, run_id: str, owes: Owes) -> int:
        """Note that others know; a run that has gone on since owes anew. Returns who is left."""
        run = self.runs[run_id]
        if run.seq == owes.seen:
            run.followers -= owes.calls
            run.reach = "" if run.reach == owes.request else run.reach
            run.orphans = run.orphans if run.reach else frozenset()
        run.returns = run.returns and bool(run.followers)
        at_rest = run.ended or run.status == "paused"
        if at_rest and not run.reach and not (run.ended and run.followers):
            run.due = None
        if owes.request == "pause" and run.is_waiting:
            for index in run.awaited:
                if run.calls[index].place == RUN:
                    run.calls[index].look = self.now
            self._arm(run)
        return len(run.followers)

    def rescue(self, *, long_queue: bool) -> tuple[list[Hint], list[Hint]]:
        owing = self.pick(self._is_overdue_at_rest)
        hints, behind = super().rescue(long_queue=long_queue)
        for run in owing:
            run.due = self.now + GRACE * 2 ** min(run.dispatches, MOST_DOUBLINGS)
            run.dispatches += 1
            hints.append((run.run_id, run.step))
        return hints, behind

    def resume(self, run_id: str, step_seen: int) -> str:
        run = self.runs[run_id]
        answer = super().resume(run_id, step_seen)
        if answer == "resumed":
            run.reach = ""
            for index in run.open_calls:
                if run.calls[index].place in BY_PEOPLE:
                    run.calls[index].look = run.calls[index].till
                elif run.calls[index].place:
                    run.calls[index].look = self.now
        return answer

    def retry(self, run_id: str, seq_seen: int) -> str:
        run = self.runs[run_id]
        answer = super().retry(run_id, seq_seen)
        if answer == "retried":
            run.reach, run.orphans = "", frozenset()
            for name, text in list(run.journal.items()):  # such a run is retried with this one
                if name[:2] == "a:" and text.startswith(END) and text != COMPLETED:
                    del run.journal[name]
            for index in run.calls:
                run.journal.pop(f"t:{index}", None)
        return answer

    def cost_of(self, run_id: str) -> int:
        """Return what a run and those below it have cost."""
        return sum(step.cost + step.below for step in self.runs[run_id].log)

    def _is_overdue_at_rest(self, run: Run) -> bool:
        at_rest = run.ended or run.status == "paused"
        return at_rest and run.due is not None and run.due <= self.now

    def _begins_to_wait(self, run: Run, index: int, park: Park) -> None:
        if index not in park.waits:
            super()._begins_to_wait(run, index, park)
            return
        place, key, within = park.waits[index]
        if run.journal.get(f"k:{index}") != key:
            run.journal.pop(f"a:{index}", None)
        call = run.calls.setdefault(index, Call())
        call.place, call.follows = place, False
        call.till = self.now + (within or PATIENCE)
        call.look = call.till if place in BY_PEOPLE else min(self.now + GRACE, call.till)
        run.journal |= {f"k:{index}": key, f"t:{index}": "", f"n:{index}": ""}
        if place in BY_PEOPLE:
            self.asks.add((run.run_id, run.step, index))
        elif self.wanted(run) != "pause":
            self.queue.insert(0, (run.run_id, run.step, index))  # type: ignore[arg-type]

    def _pause(self, run: Run) -> None:
        super()._pause(run)
        self._reach(run, "pause")

    def _end(self, run: Run, reason: str) -> None:
        super()._end(run, reason)
        if run.returns:
            run.due = self.now
        self._reach(run, "cancel")
        self._drop_asks(run)

    def _follow(self, run: Run, decision: Decision) -> None:
        if decision.step:
            self._drop_asks(run)
        super()._follow(run, decision)

    def _drop_asks(self, run: Run) -> None:
        self.asks -= {one for one in self.asks if one[0] == run.run_id}

    def _reach(self, run: Run, word: str) -> None:
        if any(run.calls[one].place == RUN for one in run.awaited):
            run.reach, run.dispatches, run.due = word, 0, self.now
