"""The step protocol as a plain model: what the store must answer, and hold, after every operation.

Written from the design, not from the scripts; shares no code with the product and knows no Redis.
Times are milliseconds of a clock of its own that only `pass_time` moves.
"""

import binascii
from collections.abc import Callable
from dataclasses import dataclass, field

LEASE = 1_000_000
GRACE = 100_000
RETRY_WAIT = 300_000
POISON = 3
REMEMBERED = 8
SHARDS = 2
MOST_DOUBLINGS, IDLE_DOUBLINGS = 7, 2
PUT_OFF = 10_000_000_000_000
NEVER = 32_503_680_000_000  # no clock of an example comes near it
AGAIN, MOST_AGAIN = 600_000, 1

STATUS_OF = {
    "completed": "completed",
    "error": "failed",
    "retry_limit": "failed",
    "steps_limit": "stopped",
    "user_requested": "cancelled",
}
ENDED = frozenset(STATUS_OF.values())
Hint = tuple[str, int]


def shard_of(run_id: str) -> int:
    """Return the shard on which a run lies."""
    return binascii.crc_hqx(run_id.encode(), 0) % SHARDS


@dataclass(frozen=True)
class Step:
    """What one committed step added. `cost` is in quarters of a dollar, `time` in half seconds.

    `author` is the token of the worker that was answered by the model ('' if none was);
    `results` are the authors of the tool results that need not be made again; `below` is what the
    runs have cost that its calls started.
    """

    failed: bool = False
    author: str = ""
    results: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    calls: int = 0
    cost: int = 0
    time: int = 0
    below: int = 0


@dataclass(frozen=True)
class Decision:
    """What a worker commits; `delay` in milliseconds, `events` how many are told."""

    move: str
    step: Step | None = None
    reason: str = ""
    delay: int = 0
    attempt: int = 0
    limited: int = 0
    pays: bool = False
    drops: bool = False
    knows_cancel: bool = False
    events: int = 0
    hold: int = 0
    outage: bool = False


@dataclass
class Call:
    """A tool call of the open step that is a task of its own, or waits for a run or a person.

    The latter has a `place` and a limit `till`; `follows` says that a run's end is owed to it.
    """

    owner: str = ""
    lease: int = 0
    look: int = 0
    starts: int = 0
    crashes: int = 0
    losses: dict[str, str] = field(default_factory=dict)
    trial: tuple[str, int] = ("", 0)
    place: str = ""
    till: int = 0
    follows: bool = False


@dataclass
class Run:
    """One run. `due` is None while nothing needs to look at it.

    `after` has the runs whose ends it waits for before it begins, `following` those of them that
    owe it their ends, since somebody has asked for these; `stops`: it ends if one has failed.
    """

    run_id: str
    batch: str
    due: int | None
    not_before: int
    status: str = "queued"
    step: int = 0
    token: str = ""
    last_token: str = ""
    lease: int = 0
    want: str = ""
    reason: str = ""
    crashes: int = 0
    attempts: int = 0
    limited: int = 0
    dispatches: int = 0
    begun: bool = False
    seq: int = 1
    ends: int = 0
    retries: int = 0
    log: list[Step] = field(default_factory=list)
    journal: dict[str, str] = field(default_factory=dict)
    ledger: dict[str, str] = field(default_factory=dict)
    committed: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    asked: list[tuple[str, str]] = field(default_factory=list)
    heard: int = 0
    calls: dict[int, Call] = field(default_factory=dict)
    waiting: tuple[int, ...] = ()
    waits_at: int = -1
    spent: int = 0
    losses: dict[str, str] = field(default_factory=dict)
    trial: tuple[str, int] = ("", 0)
    outage: str = ""
    parked: bool = False
    followers: set[tuple[int, int, str]] = field(default_factory=set)
    returns: bool = False
    reach: str = ""
    orphans: frozenset[str] = frozenset()
    after: tuple[str, ...] = ()
    following: set[str] = field(default_factory=set)
    stops: bool = False
    hinted: bool = False

    @property
    def awaited(self) -> tuple[int, ...]:
        """The calls that the open step waits for."""
        return self.waiting if self.waits_at == self.step else ()

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for them now: nobody holds the step, or has come in vain."""
        return self.status == "in_progress" and bool(self.open_calls)

    @property
    def open_calls(self) -> tuple[int, ...]:
        """The calls that may be taken."""
        return self.awaited if self.not_before and not self.token else ()

    @property
    def owned_calls(self) -> list[int]:
        """The calls that some worker makes, as far as anybody knows."""
        return [index for index in self.awaited if self.calls[index].owner]

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def group(self) -> tuple[int, str]:
        """Shard and batch: whose counters the run moves."""
        return shard_of(self.run_id), self.batch


def take_back(of: Run | Call, token: str) -> None:
    """Whoever writes late has not died, unless its end was seen."""
    if of.losses.get(token, "a")[0] not in "ac":
        del of.losses[token]
        of.crashes = max(of.crashes - 1, 0)


def know_better(of: Run | Call, token: str, how: str) -> None:
    """Note how an owner was lost, as the newest that is known."""
    of.losses.pop(token, None)
    of.losses[token] = how


class Model:
    """All runs, the queue (its head at the right end), and the order in which runs ended."""

    def __init__(self) -> None:
        self.now = 10**12
        self.runs: dict[str, Run] = {}
        self.queue: list[Hint] = []
        self.flags: dict[str, tuple[str, int]] = {}
        self.requests: list[tuple[str, str, int]] = []
        self.fleet_paused = False
        self.out: set[str] = set()
        self.endings: dict[tuple[int, str], list[str]] = {}
        self.ends: dict[tuple[int, str], int] = {}

    def pass_time(self, milliseconds: int) -> None:
        self.now += milliseconds

    def create(self, run_id: str, batch: str, delay: int) -> bool:
        if run_id in self.runs:
            return False
        not_before = self.now + delay if delay else 0
        due = self.now + (delay or GRACE)
        self.runs[run_id] = Run(run_id, batch, due, not_before)
        if not delay:
            self.queue.insert(0, (run_id, 0))
        return True

    def claim(self, run_id: str, step: int, token: str) -> str:
        run = self.runs.get(run_id)
        if run is None:
            return "unknown"
        refusal = self._not_open(run, step, token)
        if refusal or run.token == token:
            return refusal or "claimed"
        is_kept = self.fleet_paused and self.wanted(run) != "cancel"
        return "paused" if is_kept else self._take(run, token)

    def _take(self, run: Run, token: str) -> str:
        lost, word = self._vanish(run), self.unheard(run)
        wanted = self.wanted(run)
        self.hear(run)
        if word == "cancel":
            self._abandon(run, lost=lost)
            return "ended"
        if wanted == "pause":
            self._pause(run)
            return "paused"
        run.want = wanted
        if run.not_before > self.now:
            return "early"
        run.seq += run.status == "queued"
        run.parked = False
        run.status, run.token, run.lease = "in_progress", token, self.now + LEASE
        run.due, run.dispatches, run.not_before, run.begun = run.lease, 0, 0, True
        return "claimed"

    def _not_open(self, run: Run, step: int, token: str) -> str:
        if run.ended:
            return "ended"
        if run.status == "paused":
            run.hinted = False
            return "paused"
        if step > run.step:
            return "ahead"
        if step < run.step or run.last_token in {token, f"died:{token}"}:
            return "stale"
        held = bool(run.token) and run.token != token and run.lease > self.now
        return "leased" if held else ""

    def journal(self, run_id: str, step: int, token: str, entries: dict[str, str]) -> str | None:
        """Return what is wanted of the run, or None if the step is not the caller's.

        Where anything is wanted, no start is noted.
        """
        run = self.runs[run_id]
        if run.token != token or run.step != step:
            take_back(run, token)
            return None
        run.lease = run.due = self.now + LEASE
        want = self.wanted(run) or ("pause" if entries and self.fleet_paused else "")
        run.journal |= {name: by for name, by in entries.items() if not want or name[:2] != "s:"}
        return want

    def commit(self, run_id: str, step: int, token: str, decision: Decision) -> tuple[str, str]:
        """Return ('committed' | 'lost', status) or ('wanted', 'cancel')."""
        run = self.runs[run_id]
        if token == run.last_token or token in run.committed:
            return "committed", run.status
        if run.token != token or run.step != step:
            take_back(run, token)
            if decision.drops:
                run.ledger[token] = "late"
            return "lost", run.status
        if self.wanted(run) == "cancel" and not decision.knows_cancel:
            return "wanted", "cancel"
        run.token, run.last_token, run.dispatches = "", token, 0
        run.seq += decision.events
        if decision.pays:
            run.ledger[token] = "paid"
        if decision.step:
            run.log.append(decision.step)
            run.committed.add(token)
            run.step, run.journal = run.step + 1, {}
            run.attempts = run.limited = run.crashes = 0
            run.losses = {}
        if not decision.outage and decision.move != "release":
            run.outage, run.parked = "", False
        self._follow(run, decision)
        return "committed", run.status

    def _follow(self, run: Run, decision: Decision) -> None:
        if decision.move == "finish":
            if decision.step is None and "price" in run.journal:
                run.ledger["paid"] = "paid"
            self._end(run, decision.reason)
            return
        run.attempts += decision.attempt
        run.limited += decision.limited
        if decision.outage:
            run.outage, run.parked = "waits", True
            self.out.add(run.run_id)
        run.not_before = self.now + decision.delay if decision.delay else 0
        is_held = decision.hold and self.newest_request(run.batch) <= decision.hold
        if is_held or self.wanted(run) == "pause":
            self._pause(run)
            return
        run.due = self.now + (decision.delay or GRACE)
        if not decision.delay:
            self.queue.append((run.run_id, run.step))

    def wake(self, run_ids: set[str], word: str) -> int:
        """Wake those that still wait for the service; return how many."""
        self.out -= run_ids
        waiting = {one for one in run_ids if self.waits_for_service(self.runs[one])}
        for run_id in waiting:
            run = self.runs[run_id]
            run.not_before = run.due = self.now
            run.outage = word
        return len(waiting)

    def waits_for_service(self, run: Run) -> bool:
        """Return whether it is still to be woken."""
        return run.status in {"queued", "in_progress"} and not run.token and bool(run.outage)

    def once(self, run_id: str, request: str, do: Callable[[], str]) -> str:
        """Answer a request; a repetition gets the first answer, while that is remembered."""
        run = self.runs[run_id]
        known = dict(run.asked).get(request)
        if known:
            return known
        was_active = not run.ended
        answer = do()
        is_done = was_active and (answer != "active" or do.__name__ == "resume")
        if is_done or answer == "retried":
            run.asked = [(request, answer), *run.asked][:REMEMBERED]
        return answer

    def cancel(self, run_id: str) -> str:
        run = self.runs[run_id]
        if run.ended:
            return "ended"
        if run.token and run.lease > self.now:
            run.want = "cancel"
            return "requested"
        self._abandon(run, lost=self._vanish(run))
        return "cancelled"

    def pause(self, run_id: str) -> str:
        run = self.runs[run_id]
        if run.ended:
            return "ended"
        self.hear(run)
        if run.token and (run.lease > self.now or run.want == "cancel"):
            run.want = run.want or "pause"
            return "requested"
        hinted = not (run.token or run.not_before)
        self._vanish(run)
        if run.status != "paused":
            self._pause(run)
            run.hinted = hinted
        return "paused"

    def resume(self, run_id: str, step_seen: int) -> str:
        run = self.runs[run_id]
        if run.ended:
            return "ended"
        self.hear(run)
        if run.status != "paused":
            run.want = "" if run.want == "pause" else run.want
            return "active"
        run.status, run.seq = "in_progress" if run.begun else "queued", run.seq + 1
        run.due, run.not_before, run.dispatches = self.now + GRACE, 0, 0
        run.parked = False
        if not run.hinted:
            self.queue.append((run_id, step_seen))
        run.hinted = False
        return "resumed"

    def retry(self, run_id: str, seq_seen: int) -> str:
        run = self.runs[run_id]
        if not run.ended:
            return "active"
        if run.seq != seq_seen:
            return "changed"
        if run.log and run.log[-1].failed:
            taken_back = run.log.pop()
            if run.journal:
                run.ledger[f"open {run.retries}"] = "retried"
            run.journal = {f"r:{index}": by for index, by in taken_back.results.items()}
            if taken_back.author:
                run.journal |= {"response": taken_back.author, "price": ""}
            run.ledger[f"retry {run.retries}"] = "retried"
        self._group(run).remove(run_id)
        self.hear(run)
        run.status, run.reason, run.want, run.begun = "in_progress", "", "", False
        run.step, run.retries, run.seq = len(run.log), run.retries + 1, run.seq + 1
        run.attempts = run.limited = run.crashes = run.dispatches = run.not_before = 0
        run.losses, run.trial = {}, ("", 0)
        run.outage, run.parked, run.hinted = "", False, False
        run.due = self.now + GRACE
        self.queue.append((run_id, run.step))
        return "retried"

    def rescue(self, *, long_queue: bool) -> tuple[list[Hint], list[Hint]]:
        """Return the hints for the queue's head and for its end, in no particular order.

        The caller queues them.
        """
        hints: list[Hint] = []
        behind: list[Hint] = []
        again = self._published_again() if long_queue else []
        for run in self.runs.values():
            looked_at = run in again or self._is_looked_at(run.due, long_queue=long_queue)
            if run.due is None or not looked_at or run.ended or run.status == "paused":
                continue
            if self.fleet_paused:
                if run.due <= self.now and run.want == "cancel":
                    run.due = self.now + GRACE * 2 ** min(run.dispatches, MOST_DOUBLINGS)
                    run.dispatches += 1
                    hints.append((run.run_id, run.step))
                continue
            if self.is_kept(run):
                run.due = self.now + GRACE
                continue
            first = run.dispatches == 0
            most = MOST_DOUBLINGS if long_queue else IDLE_DOUBLINGS
            wait = GRACE * 2 ** min(run.dispatches, most)
            run.dispatches += 1
            begun = run.status == "in_progress"
            publish = not long_queue or begun or bool(run.not_before and first)
            run.due = self.now + (wait if publish else PUT_OFF + wait * 16)
            if publish:
                hints.append((run.run_id, run.step))
            elif run in again:
                behind.append((run.run_id, run.step))
        return hints, behind

    def _is_looked_at(self, due: float | None, *, long_queue: bool) -> bool:
        """The queue is long or as good as empty; what was put off waits for the latter."""
        return due is not None and (due <= self.now or (due >= PUT_OFF and not long_queue))

    def _published_again(self) -> list[Run]:
        """Return those of each shard that waited longest: a long queue may have lost their hint."""
        till = PUT_OFF + self.now - AGAIN
        stale = self.pick(lambda run: run.due is not None and PUT_OFF <= run.due <= till)
        stale.sort(key=lambda run: (run.due, run.run_id))
        shards = [[run for run in stale if shard_of(run.run_id) == n] for n in range(SHARDS)]
        return [run for shard in shards for run in shard[:MOST_AGAIN]]

    def is_kept(self, run: Run) -> bool:
        """Tell whether the run's batch is to keep it from work, and it has not heard of that."""
        return self.unheard(run) in {"cancel", "pause"}

    def pick(self, which: Callable[[Run], bool]) -> list[Run]:
        """Return the runs for which `which` holds."""
        return [run for run in self.runs.values() if which(run)]

    def _abandon(self, run: Run, *, lost: bool) -> None:
        has_price = "paid" in run.journal or "price" in run.journal
        if has_price or (lost and "response" in run.journal):
            run.ledger["paid"] = "interrupted"
        run.seq += 1
        self._end(run, "user_requested")

    def unheard(self, run: Run) -> str:
        """Return what is asked of the run's batch, where the run has not heard of it."""
        word, number = self.flags.get(run.batch, ("", 0))
        return word if run.heard != number else ""

    def newest_request(self, batch: str) -> int:
        """Return the number of the newest request to a batch, in force or over."""
        return max((number for one, _, number in self.requests if one == batch), default=0)

    def hear(self, run: Run) -> None:
        run.heard = self.flags.get(run.batch, ("", run.heard))[1]

    def wanted(self, run: Run) -> str:
        """Return what is wanted of a run, by itself and by its batch."""
        word = self.unheard(run)
        if "cancel" in (run.want, word):
            return "cancel"
        return {"pause": "pause", "resume": ""}.get(word, run.want)

    def flag(self, batch: str, word: str, number: int) -> None:
        """Ask something of a whole batch: in force, though no run was looked at."""
        self.flags[batch] = (word, number)
        self.requests.append((batch, word, number))

    def lift(self, batch: str) -> None:
        """Take what was asked of a batch away."""
        del self.flags[batch]

    def sweep(self, batch: str) -> list[Hint]:
        """Bring a batch's runs to what was asked; return the hints of those that go on."""
        word, number = self.flags[batch]
        hints = []
        for run in self.pick(lambda run: run.batch == batch and not run.ended):
            if run.heard == number:
                continue
            run.heard = number
            if word == "cancel":
                self.cancel(run.run_id)
            elif word == "pause":
                self.pause(run.run_id)
            else:
                before = len(self.queue)
                self.resume(run.run_id, run.step)
                hints += self.queue[before:]
                del self.queue[before:]
        return hints

    def _vanish(self, run: Run) -> bool:
        """Note the loss of an owner whose lease ran out; tell whether there is one."""
        if run.token:
            run.crashes += 1
            run.ledger[run.token] = "crash"
            know_better(run, run.token, self._lost_at(run))
        return bool(run.token)

    def _lost_at(self, run: Run) -> str:
        if run.trial[0] == run.token:
            return f"p{run.trial[1]}"
        started = [name[2:] for name in run.journal if name.startswith("s:")]
        names = run.journal.keys()
        running = [one for one in started if not {f"r:{one}", f"o:{one}"} & names]
        return "t" if running else "m"

    def begin(self, run_id: str, step: int, token: str, group: int) -> bool:
        """A process for suspects begins the step; return whether it may."""
        run = self.runs[run_id]
        if run.token != token or run.step != step:
            return False
        run.trial = (token, group)
        return True

    def died(self, run_id: str, step: int, token: str, group: int) -> None:
        """That process has died, as whoever started it tells."""
        run = self.runs[run_id]
        if run.ended or run.step != step:
            return
        if run.token != token:
            if token in run.losses:
                know_better(run, token, f"a{group}")
            return
        run.crashes += 1
        run.ledger[token] = "crash"
        know_better(run, token, f"a{group}")
        run.token, run.last_token, run.dispatches, run.due = "", f"died:{token}", 0, self.now
        self.queue.append((run_id, step))

    def _pause(self, run: Run) -> None:
        run.seq += 1
        self.hear(run)
        run.status, run.token, run.want, run.due = "paused", "", "", None

    def _end(self, run: Run, reason: str) -> None:
        run.status, run.reason, run.want, run.due = STATUS_OF[reason], reason, "", None
        run.token, run.ends = "", run.ends + 1
        self._group(run).append(run.run_id)
        self.ends[run.group] = self.ends.get(run.group, 0) + 1

    def _group(self, run: Run) -> list[str]:
        return self.endings.setdefault(run.group, [])
