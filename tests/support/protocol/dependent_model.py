"""Runs that begin behind the ends of others, in the protocol's plain model.

Written from the design, not from the scripts; shares no code with the product and knows no Redis.
"""

from collections.abc import Sequence

from support.protocol.linked_model import Address, LinkedModel
from support.protocol.model import GRACE, NEVER, Run

BEGINNING = -1
"""In place of a call's index: the run itself waits."""


class DependentModel(LinkedModel):
    """The model of everything, with runs that wait for others before they begin.

    The journal of one that waits notes the ends that it has been told of.
    """

    def create_behind(self, run_id: str, batch: str, after: Sequence[str], *, stops: bool) -> None:
        """Create a run that waits for the ends of `after`, which need not exist."""
        assert self.create(run_id, batch, 0)
        run = self.runs[run_id]
        run.after, run.stops, run.not_before = tuple(dict.fromkeys(after)), stops, NEVER

    def ahead(self, run: Run) -> list[str]:
        """Return the runs whose ends it has not been told of."""
        return [one for one in run.after if f"d:{one}" not in run.journal]

    def ask_for_end(self, run_id: str, before: str) -> str:
        """Have the end of `before` sent to a run: 'followed', 'ended' or 'unknown'."""
        if before not in self.runs:
            return "unknown"
        told = self.follow(before, address_of(run_id))
        run = self.runs.get(run_id)
        if told == "followed" and run and before in self.ahead(run):
            run.following.add(before)
        return told

    def arrived(self, run_id: str, before: str) -> None:
        """Tell a run that one before it has ended: the last one makes it due."""
        run = self.runs.get(run_id)
        if run is None or run.ended or not run.after or f"d:{before}" in run.journal:
            return
        run.journal[f"d:{before}"] = ""
        run.following.discard(before)
        if not self.ahead(run) and run.status != "paused":
            run.dispatches, run.due = 0, self.now
            self.queue.append((run_id, 0))

    def look_later(self, run_id: str, seen: int, wait: int) -> str:
        """Return 'ready' where all have ended, 'wait', or 'changed': its events were `seen`."""
        if not self._waits_as(run_id, seen):
            return "changed"
        run = self.runs[run_id]
        if not self.ahead(run):
            return "ready"
        run.due = self.now + wait
        return "wait"

    def wait_again(self, run_id: str, seen: int, before: str) -> str:
        """One that had ended goes on: it is waited for once more."""
        if not self._waits_as(run_id, seen):
            return "changed"
        self.runs[run_id].journal.pop(f"d:{before}", None)
        return "again"

    def let_begin(self, run_id: str, seen: int) -> str:
        """Let it begin, unless one of those before it is waited for again."""
        if not self._waits_as(run_id, seen) or self.ahead(self.runs[run_id]):
            return "changed"
        run = self.runs[run_id]
        run.after, run.journal, run.following = (), {}, set()
        run.not_before, run.dispatches, run.due = 0, 0, self.now + GRACE
        self.queue.append((run_id, 0))
        return "begin"

    def let_end(self, run_id: str, seen: int) -> str:
        """End it without a step."""
        if not self._waits_as(run_id, seen) or self.ahead(self.runs[run_id]):
            return "changed"
        run = self.runs[run_id]
        run.seq += 1
        self._end(run, "error")
        return "end"

    def remove(self, run_id: str) -> None:
        """Remove an ended run with its records; its hints stay in the queue."""
        run = self.runs.pop(run_id)
        self._group(run).remove(run_id)

    def resume(self, run_id: str, step_seen: int) -> str:
        answer = super().resume(run_id, step_seen)
        run = self.runs[run_id]
        if answer == "resumed" and run.after:
            run.not_before = NEVER
        return answer

    def retry(self, run_id: str, seq_seen: int) -> str:
        answer = super().retry(run_id, seq_seen)
        run = self.runs[run_id]
        if answer == "retried" and run.after:
            run.journal, run.following, run.not_before = {}, set(), NEVER
        return answer

    def _waits_as(self, run_id: str, seen: int) -> bool:
        run = self.runs.get(run_id)
        if run is None or run.ended or run.status == "paused":
            return False
        return bool(run.after) and run.seq == seen


def address_of(run_id: str) -> Address:
    """Return how a run names the one that waits for its end before it begins."""
    return (0, BEGINNING, run_id)
