"""A loaded fleet shrinks to no worker and comes back, while its keepers are killed.

python benchmarks/shrinking.py                       # 1,000 runs, 3 workers, 12 keepers killed
python benchmarks/shrinking.py --runs 60 --workers 2 --keeper-kills 1 --worker-kills 0 --overdue

Two keepers are there all the time. Runs are submitted, and then: `workers` come; each is stopped by
SIGTERM, until there is none; runs are submitted with delays, calls that wait for a person come to
their ends, and a schedule has its tick; when keepers have dispatched all that, and most of them
were killed, as many workers come back, of which some are killed by SIGKILL, and all runs end. A
limit admits some calls at once. A keeper is killed by SIGKILL at a random moment, or where Redis is
changed and nothing is published; another one takes its place.

The model (stub.py) counts the calls, the runs' tool its effects; results, events and leases are
read from the store. `repeated`: calls made again for the same turn; not more than `bound`: the runs
that killed workers had in hand, and steps that were handed back. `late`: seconds from the end of a
wait until its message was in the queue, where nobody took it. Exits with 1 where something is lost,
doubled, or wrong.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import redis
from crew import Crew, calls_of, crew, drained, effects_of, held, name_of, repeated
from keepers import Keepers
from loads import Setup, environment, lines, servers
from processes import HERE, until
from reports import Column, Report, begin, finish, parser, progress, show

from stepfleet import Agent, AsyncFleet, Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.events.domain_events import AgentStepCompleted, from_envelope
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.keys import KEEPERS, SCHEDULE_TURNS, Keys

AGENTS = HERE / "shrinking_agent.py"
WAIT = "WAIT_SECONDS"
"""The variable with the seconds after which a call of the waiting agent is approved by itself."""
KEEPERS_ALIVE = 2
MODEL = "openai:benchmark"
QUEUE = "stepfleet"
SCHEDULE = "tick"
LONGEST = 600.0
WITHIN = 120.0
KILL_SECONDS = 30.0
"""What a kill may take, with the start of the next keeper."""
WAITER_STEPS = 2
SHARE = 20
"""So many runs for one that waits for a person, one that is delayed, and five of the schedule."""
PUT_OFF = 1e13
"""Above all times: the place in the index of those that wait until the queue is nearly empty."""
INTERRUPTED = "interrupted"
_MS = 1000


@dataclass
class Expected:
    """What is to happen: the question and the steps of each run, by its id."""

    runs: dict[str, tuple[str, int]] = field(default_factory=dict)

    def add(self, run: str, question: str) -> None:
        """Note a run; its question says how many turns it has."""
        self.runs[run] = question, int(question.split(" ", 1)[0])

    def batch(self, batch: str, given: Sequence[Mapping[str, str]]) -> None:
        """Note the runs of a batch."""
        for row, line in enumerate(given):
            self.add(run_id_of(batch, row), line["input"])

    @property
    def calls(self) -> set[tuple[str, int]]:
        """The least calls: each turn of each question once."""
        return {(text, turn) for text, steps in self.runs.values() for turn in range(steps)}


@dataclass
class Scene:
    """A fleet with its keepers, and what was seen of it."""

    args: argparse.Namespace
    variables: Mapping[str, str]
    folder: Path
    store: redis.Redis
    client: Fleet
    crew: Crew
    keepers: Keepers
    agents: Mapping[str, Agent]
    expected: Expected = field(default_factory=Expected)
    phases: list[dict[str, Any]] = field(default_factory=list)
    drains: list[float] = field(default_factory=list)
    in_hand: int = 0
    left_held: int = 0
    began: float = field(default_factory=time.monotonic)

    def until(self, check: Callable[[], object], within: float = WITHIN) -> float:
        """Wait until `check()`, while keepers are killed; return the monotonic time of it."""
        return until(lambda: (self.keepers.look(), check())[1], within=within)

    def say(self, phase: str) -> dict[str, Any]:
        """Note the signal for autoscalers, as `stepfleet scale` shows it, and return it."""
        said = self.client.scale(slots_per_worker=self.args.slots).to_dict()
        row = {"phase": phase, "second": time.monotonic() - self.began, "done": self.done()}
        fields = ("workers", "work", "queued", "due_soon", "in_hand", "wanted")
        row |= {name: said[name] for name in fields}
        row |= {"limits": said["waits"].get("limits", 0), "waits": said["waits"]}
        self.phases.append(row)
        progress.print(f"{phase}: {said}")
        return row

    def done(self) -> int:
        """Return how many runs have ended, of batches."""
        return sum(one.completed + one.failed for one in self.client.batches.newest())

    def holds(self) -> dict[str, list[str]]:
        """Return the runs that are leased, by worker."""
        return held(self.store, self.expected.runs)


# ----------------------------------------------------------------------------------- the scene


def play(on: Scene) -> dict[str, Any]:
    """Let the fleet grow, shrink to nothing and come back; return what was seen of it."""
    args = on.args
    on.client.limits.set(MODEL, in_flight=args.in_flight)
    for _ in range(KEEPERS_ALIVE):
        on.keepers.start()
    for agent, given in (
        ("waiter", lines(max(args.runs // SHARE, 1), WAITER_STEPS)),
        ("mover", lines(args.runs, args.steps)),
    ):
        on.expected.batch(on.client.submit_batch(given, agent=on.agents[agent]).id, given)
    on.say("submitted")
    on.client.pause()  # or the first worker might do all before there is another one
    _grow(on)
    on.client.resume()
    on.until(lambda: on.store.hlen(Keys().of(KEEPERS)) == KEEPERS_ALIVE)
    on.until(lambda: on.done() >= args.runs * args.drain_at)
    on.say("workers came")
    on.keepers.begin()
    began = time.monotonic()
    for worker in list(on.crew.workers):
        _drain(on, worker)
    found = {"to_zero": time.monotonic() - began, **_without_workers(on)}
    found["at_zero"] = on.say("no workers")
    on.keepers.phase, back = "workers are back", time.monotonic()
    on.client.limits.set(MODEL, in_flight=args.then_in_flight or args.in_flight)
    _grow(on)
    on.say("workers are back")
    for number in range(args.worker_kills):
        _kill(on, (number + 1) / (args.worker_kills + 1))
    on.until(lambda: all(map(_is_over, on.client.batches.newest())), LONGEST)
    for run in found.pop("delayed"):
        on.client.runs.wait(run, timeout=WITHIN)
    found |= {"back_began": back, "back": time.monotonic() - back}
    on.until(lambda: on.client.scale().work == 0)
    return {**found, "at_end": on.say("all ended"), **_stored(on)}


def _is_over(progress_now: Any) -> bool:
    return bool(progress_now.sealed and progress_now.done == progress_now.submitted)


def _grow(on: Scene) -> None:
    """Start the workers; return when the fleet sees all of them."""
    on.crew.start(on.args.workers)
    names = set(map(name_of, on.crew.workers))
    on.until(lambda: names <= {one.name for one in on.client.overview().workers})


def _drain(on: Scene, worker: "subprocess.Popen[str]") -> None:
    """Stop a worker that has runs in hand by SIGTERM; note what it still holds after its end."""
    name, on.keepers.phase = name_of(worker), "workers go"
    on.until(lambda: on.holds().get(name))
    on.drains.append(drained(worker, on.keepers.look))
    on.crew.workers.remove(worker)
    on.left_held += len(on.holds().get(name, []))


def _kill(on: Scene, share: float) -> None:
    """Kill a worker that has runs in hand, when a share of what was left has ended."""
    done = on.phases[-1]["done"]
    wanted = done + (len(on.expected.runs) - done) * share
    victim = on.keepers.draw.choice(on.crew.workers)
    on.until(lambda: on.done() >= wanted and on.holds().get(name_of(victim)), LONGEST)
    on.crew.kill(victim)
    on.in_hand += len(on.holds().get(name_of(victim), []))


def _without_workers(on: Scene) -> dict[str, Any]:
    """Let waits end while only keepers are there; return how late what came of them was.

    Raises `TimeoutError` where a keeper does not dispatch them, and submit the schedule's batch.
    """
    args, began, since = on.args, time.monotonic(), _now(on.store)
    on.keepers.phase = "no workers"
    few = max(args.runs // SHARE, 1)
    delayed = []
    for number, line in enumerate(lines(few, args.steps)):
        delay = 1 + args.empty * number / few
        run = on.client.submit(on.agents["mover"], line["input"], delay=delay)
        on.expected.add(run, line["input"])
        delayed.append(run)
    given = lines(5 * few, args.steps)
    tick = asyncio.run(_schedule(on, given))
    timers = _deadlines(on, since)
    last = -(-2 * args.keeper_kills // 3)
    seen: dict[str, float] = {}
    found: list[Any] = []

    def missing() -> list[str]:
        seen.update(_arrived(on, timers.keys() - seen.keys()))
        found[:] = [one for one in on.client.batches.newest() if one.name.startswith(SCHEDULE)]
        late = [run for run in sorted(timers.keys() - seen.keys()) if not _is_put_off(on, run)]
        return [
            *(f"the message of {run}, in {late_by(run):.1f} s" for run in late),
            *(["the schedule's batch"] if not any(map(_is_submitted, found)) else ()),
            *(["keepers' kills"] if len(on.keepers.kills) < last else ()),
            *(["time without workers"] if time.monotonic() - began < args.empty else ()),
        ]

    def late_by(run: str) -> float:
        return timers[run] - _now(on.store)

    try:
        on.until(lambda: not missing(), WITHIN + KILL_SECONDS * args.keeper_kills)
    except TimeoutError as error:
        raise TimeoutError(f"without workers, {error}: {', '.join(missing())}") from None
    [batch] = found
    on.expected.batch(batch.batch_id, given)
    return {
        "delayed": delayed,
        "empty": time.monotonic() - began,
        "timers": len(timers),
        "put_off": len(timers) - len(seen),
        "timers_late": max((at - timers[run] for run, at in seen.items()), default=0.0),
        "schedule_late": batch.created.timestamp() - tick,
    }


def _is_put_off(on: Scene, run: str) -> bool:
    """Tell whether a run waits for a short queue: its message was lost with a keeper."""
    keys = Keys()
    score = on.store.zscore(keys.due(keys.shard_of(run)), run)
    return score is not None and score >= PUT_OFF


def _is_submitted(batch: Any) -> bool:
    return bool(batch.sealed and batch.submitted == batch.total)


def _deadlines(on: Scene, since: float) -> dict[str, float]:
    """Return when each run's wait ends, if after `since`: seconds since 1970, by run id.

    Not those of calls that no worker has attended to yet: they may last for days.
    """
    found, last = {}, since + WITHIN + max(on.args.wait, on.args.empty)
    for run in on.expected.runs:
        wait = json.loads(on.store.hget(Keys().run(run), "wait") or "{}")
        if wait.get("reason") in {"delay", "calls"} and since < wait["deadline"] / _MS < last:
            found[run] = wait["deadline"] / _MS
    return found


def _arrived(on: Scene, runs: Iterable[str]) -> dict[str, float]:
    """Return the time for those runs that have a message in the queue."""
    messages = b"\n".join(on.store.lrange(QUEUE, 0, -1)).decode()
    now = _now(on.store)
    return {run: now for run in runs if run in messages}


def _now(store: redis.Redis) -> float:
    seconds, micros = store.time()
    return float(seconds + micros / 1e6)


async def _schedule(on: Scene, given: list[dict[str, str]]) -> float:
    """Add the schedule; return its tick: the next full minute's, or, `overdue`, one that passed."""
    overdue, agent = on.args.overdue, on.agents["mover"]
    async with AsyncFleet(on.variables["STEPFLEET_REDIS_URL"]) as fleet:
        store = (await store_of(fleet)).schedules
        now = await store.now()
        # Far enough that it is stored before the tick; an hourly one does not come again.
        at = now + timedelta(minutes=30 if overdue else 1, seconds=0 if overdue else 5)
        view = await fleet.schedules.add(SCHEDULE, given, agent, cron=f"{at.minute} * * * *")
        if view.next_tick is None:
            raise RuntimeError("the schedule has no tick")
        if not overdue:
            return view.next_tick.timestamp()
        # As if it had been added an hour ago, and nobody had been there since.
        earlier = view.schedule.model_copy(update={"created": now - timedelta(hours=1)})
        await store.change(earlier, now)
        return now.timestamp()


def _stored(on: Scene) -> dict[str, Any]:
    """Return what the store holds of all runs: results, steps and their commits, attempts."""
    ended, commits, attempts = Counter[str](), Counter[int](), Counter[str]()
    for run, (_, steps) in on.expected.runs.items():
        result = on.client.runs.result(run)
        is_whole = [one.step for one in result.steps] == list(range(1, steps + 1))
        ended[
            "completed" if result.success and is_whole and result.output == "done" else "not"
        ] += 1
        attempts.update(one.kind for one in result.lost_attempts)
        told = (event for one in on.client.runs.events(run) for event in from_envelope(one))
        made = Counter(one.step_number for one in told if isinstance(one, AgentStepCompleted))
        commits.update(made[number + 1] for number in range(steps))
    keys = on.store.scan_iter(match="sf:{s*}:run:*", count=1000)
    known = {key.decode().split(":run:")[1].split(":")[0] for key in keys}
    return {
        "runs": len(on.expected.runs),
        "completed": ended["completed"],
        "lost": len(on.expected.runs.keys() - known),
        "extra": len(known - on.expected.runs.keys()),
        "commits": dict(commits),
        "attempts": dict(attempts),
    }


# --------------------------------------------------------------------------------- what it shows


def measure(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Play the scene on servers of its own; return what came of it."""
    with (
        tempfile.TemporaryDirectory(prefix="sf-shrinking-") as name,
        _scene(args, seed, Path(name)) as (on, stack),
    ):
        found = play(on)
        for process in (*on.crew.workers, *(one.process for one in on.keepers.alive)):
            process.terminate()
        stack.close()
        calls = calls_of(on.folder / "calls.jsonl")
        found |= effects_of(on.folder / "effects")
    found |= _checked(on, calls, found)
    kills = [{"number": n + 1, **one} for n, one in enumerate(on.keepers.kills)]
    return {"seed": seed, **found, "phases": on.phases, "kills": kills}


@contextlib.contextmanager
def _scene(
    args: argparse.Namespace, seed: int, folder: Path
) -> Iterator[tuple[Scene, contextlib.ExitStack]]:
    """Yield a scene without processes of the fleet, and what ends all that will be started."""
    (folder / "effects").touch()
    setup = Setup(latency=str(args.latency), log=folder / "calls.jsonl", stub=True)
    with contextlib.ExitStack() as stack:
        url, served = stack.enter_context(servers(setup))
        variables = {
            **environment(url, served.url, args.slots),
            "STEPFLEET_AGENTS": str(AGENTS),
            "STEPFLEET_LEASE": str(args.lease),
            "STEPFLEET_GRACE": str(args.grace),
            "STEPFLEET_DRAIN": str(args.drain),
            "STEPFLEET_NO_CHECK": "1",  # it would call the model, whose calls are counted
            "EFFECTS": str(folder / "effects"),
            WAIT: str(args.wait),
        }
        store = stack.enter_context(redis.Redis.from_url(url))
        client = stack.enter_context(Fleet(url))
        working = stack.enter_context(crew(variables))

        def deeds(name: str) -> str:
            if not store.hexists(Keys().of(KEEPERS), name):
                return ""
            turn = store.get(Keys().of(f"{SCHEDULE_TURNS}{SCHEDULE}")) or b""
            return "while it submits" if name in turn.decode() else "at work"

        draw, kills = random.Random(seed), (args.keeper_kills, args.every)  # noqa: S311 - no secret
        os.environ[WAIT] = variables[WAIT]
        agents = load_agents(str(AGENTS))
        keepers = Keepers(variables, working.running, working.log, draw, *kills, deeds)
        try:
            yield Scene(args, variables, folder, store, client, working, keepers, agents), stack
        except Exception:
            sys.stderr.write("\n".join(working.logged()[-40:]) + "\n")
            raise


def _checked(on: Scene, calls: list[dict[str, Any]], found: dict[str, Any]) -> dict[str, Any]:
    """Compare what the model saw and what the store holds with what was to happen."""
    made = {(one["run"], one["turn"]) for one in calls}
    first = min(
        (one["arrived"] for one in calls if one["arrived"] > found["back_began"]), default=0
    )
    shown = {
        "calls": len(calls),
        "least": len(on.expected.calls),
        "missed": len(on.expected.calls - made),
        "unknown": len(made - on.expected.calls),
        "repeated": repeated(calls),
        "handed_back": (back := found["attempts"].get(INTERRUPTED, 0)),
        "bound": on.in_hand + back,
        "left_held": on.left_held,
        "drains": on.drains,
        "drain": max(on.drains),
        "first_call": first - found["back_began"],
    }
    once = found["commits"].keys() == {1}
    zero, end = found["at_zero"], found["at_end"]
    wrong = {
        "runs": found["completed"] != found["runs"] or found["lost"] or found["extra"],
        "commits": not once,
        "calls": shown["missed"] or shown["unknown"] or shown["repeated"] > shown["bound"],
        "effects": found["twice"],
        "leases after a drain": shown["left_held"],
        "signal without workers": zero["workers"] or zero["in_hand"] or not zero["wanted"],
        "signal at the end": end["work"] or end["wanted"],
        "kills": len(on.keepers.kills) < on.args.keeper_kills,
    }
    return {**shown, "once": once, "wrong": [name for name, is_so in wrong.items() if is_so]}


TABLES = (
    (
        "Runs and calls",
        ("runs", "completed", "lost", "extra", "calls", "least", "repeated", "bound"),
    ),
    ("Commits and effects", ("once", "twice", "effects", "left_held")),
    ("Seconds", ("drain", "to_zero", "empty", "first_call", "back")),
    ("Waits that ended without workers", ("timers", "put_off", "timers_late", "schedule_late")),
)
FLOATS = {"drain", "to_zero", "empty", "first_call", "back", "timers_late", "schedule_late"}
PHASES = (
    *(Column("phase", "phase"), Column("second", "second", 1), Column("ended", "done", 0)),
    *(Column("workers", "workers", 0), Column("wanted", "wanted", 0), Column("work", "work", 0)),
    *(Column("queued", "queued", 0), Column("in hand", "in_hand", 0)),
    Column("wait for limits", "limits", 0),
)
KILLS = (
    *(Column("kill", "number", 0), Column("while", "phase"), Column("at", "place")),
    Column("its age, s", "age", 1),
)


def tables(report: Report) -> None:
    """Print everything about each scene."""
    for title, names in TABLES:
        columns = [Column(one.replace("_", " "), one, int(one in FLOATS)) for one in names]
        show(title, report.rows, ("seed",), [Column("seed", "seed"), *columns])
    for row in report.rows:
        show(f"stepfleet scale, seed {row['seed']}", row["phases"], ("second",), PHASES)
        show(f"Keepers killed, seed {row['seed']}", row["kills"], ("number",), KILLS)


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    add = made.add_argument
    add("--runs", type=int, default=1000)
    add("--steps", type=int, default=4)
    add("--latency", type=float, default=1.0, help="seconds of a model's answer")
    add("--workers", type=int, default=3, help="that go, and as many that come back")
    add("--slots", type=int, default=100, help="of each worker")
    add("--in-flight", type=int, default=150, help="calls at once, by the limit")
    add("--then-in-flight", type=int, help="the same, from the return of workers on")
    add("--drain", type=float, default=20.0, help="seconds that a stopped worker has for its steps")
    add("--drain-at", type=float, default=0.1, help="the share of runs that end before it begins")
    add("--empty", type=float, default=10.0, help="seconds without workers, at the least")
    add("--wait", type=float, default=30.0, help="seconds until a call is approved by itself")
    add("--overdue", action="store_true", help="let the tick have passed: no wait for a minute")
    add("--keeper-kills", type=int, default=12)
    add("--every", type=float, default=3.0, help="seconds between these kills, about")
    add("--worker-kills", type=int, default=2, help="of those that came back; fewer than these")
    add("--lease", type=float, default=15.0)
    add("--grace", type=float, default=2.0)
    add("--seed", type=int, default=1)
    given = made.parse_args()
    if not 0 <= given.worker_kills < given.workers:
        made.error("--worker-kills must be less than --workers: somebody has to end the runs")
    return given


def main() -> None:
    """Play, print, and write the files."""
    args = arguments()
    report = begin("shrinking", args)
    for number in itertools.islice(itertools.count(args.seed), args.repeat):
        report.add(measure(args, number))
    tables(report)
    finish(report, args, list)
    wrong = [
        f"seed {row['seed']}: {', '.join(row['wrong'])}" for row in report.rows if row["wrong"]
    ]
    if wrong:
        sys.exit("\n".join(["wrong:", *wrong]))


if __name__ == "__main__":
    main()
