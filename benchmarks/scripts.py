"""The longest single call of each script of the store, with the largest inputs that make sense.

python benchmarks/scripts.py
python benchmarks/scripts.py --steps 500 5000 --active 50000 --state 64 1024 --calls 256

Redis serves nobody else while a script runs. Times are Redis's own (SLOWLOG). Each case is played
`--tries` times on fresh data and the quickest counts: on a machine that does other work the longest
one measures that work. `--steps`: a run's log, each step with `--size` bytes; `--active`: runs of
one shard; `--state`: kilobytes of a run's state; `--calls`: tool calls of one answer.
"""

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from processes import redis_server
from redis.asyncio import Redis
from reports import Column, Report, begin, finish, parser, show

from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.feeds import JOINED_AT_ONCE
from stepfleet.orchestrator.store.lua import run_script
from stepfleet.orchestrator.store.runs.submission import pages
from stepfleet.worker.runtime.rescuer import MOST_PER_SHARD

RUN, DUE, QUEUE = "sf:{s00}:run:r", "sf:{s00}:due", "queue"
KEYS = [RUN, DUE, QUEUE]
AT_ONCE = 1000
PAGE, EXPIRED_AT_ONCE = 25, 200
"""Runs in one call of a sweep, which follows the time that they take, and of an expiry."""
ENDED = {"status": "completed", "stop_reason": "completed", "error": "", "retention": 600}
Play = Callable[["Store"], Awaitable[None]]


class Store:
    """A Redis that notes how long calls take, and records written as the store writes them."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self.client: Any = Redis.from_url(url, decode_responses=True)
        self.connection = Connection(self.client, patience=600)
        self.args = args

    async def run(self, **fields: Any) -> None:
        """Write a run's header."""
        plain = {"status": "in_progress", "step": 0, "token": "t", "batch": "b", "seq": 1, "v": 1}
        slim = '{"step_count":1}'
        await self.client.hset(RUN, mapping={**plain, "slim": slim, **fields})
        await self.client.zadd(DUE, {"r": 1})

    async def log(self, steps: int) -> None:
        """Write a log, its outcomes, and who committed each step."""
        text = "x" * self.args.size
        for first in range(0, steps, AT_ONCE):
            part = range(first, min(first + AT_ONCE, steps))
            await self.client.hset(f"{RUN}:log", mapping={str(n): text for n in part})
            await self.client.hset(f"{RUN}:log", mapping={f"by:{n:016x}": n for n in part})
            await self.client.hset(f"{RUN}:outcomes", mapping={str(n): text[:400] for n in part})

    async def active(self, runs: int) -> None:
        """Write runs of the shard that are overdue and have published one event each."""
        for first in range(0, runs, AT_ONCE):
            pipe = self.client.pipeline(transaction=False)
            for n in range(first, min(first + AT_ONCE, runs)):
                key = f"sf:{{s00}}:run:a{n}"
                pipe.hset(key, mapping={"status": "in_progress", "step": 1, "agent": "a"})
                pipe.xadd(f"{key}:events", {"first": 1, "events": "[]"})
                pipe.zadd(DUE, {f"a{n}": n + 1})
            await pipe.execute()

    async def script(self, name: str, *args: Any, keys: list[str] | None = None) -> Any:
        """Run a script."""
        return await run_script(self.connection, name, keys or KEYS, *args)

    async def longest(self) -> float:
        """Return the longest script call since the last time, in milliseconds."""
        found = await self.client.slowlog_get(10_000)
        await self.client.slowlog_reset()
        calls = [one["duration"] for one in found if str(one["command"])[:6].find("EVAL") >= 0]
        return max(calls, default=0) / 1000


def flat(**fields: Any) -> list[Any]:
    """Return name, value, ... as scripts take them."""
    return [part for pair in fields.items() for part in pair]


def commit(**more: Any) -> list[Any]:
    """Return what a commit says."""
    fields = {
        "verdict": "continue",
        "slim": "{}",
        "outcome": "{}",
        "log": "x",
    }
    rest = {"grace": 5000, "message": "m", "events": "[]", "event_count": 1, "tokens": 1, "cost": 1}
    return flat(**{**fields, **rest, "calls": 1, **more})


def history(steps: int) -> dict[tuple[str, str], Play]:
    """Return what depends on how long a run's log is."""

    async def claim(on: Store) -> None:
        await on.run(step=steps, token="")
        await on.log(steps)
        await on.script("claim", "r", steps, "n", 30_000, "w", "")

    async def end(on: Store) -> None:
        await on.run(step=steps)
        await on.log(steps)
        await on.script("commit", "r", steps, "t", *commit(verdict="finish", **ENDED))

    async def trim(on: Store) -> None:
        await on.run(step=steps)
        await on.log(steps)
        await on.script("commit", "r", steps, "t", *commit(since=f"{steps - 1} input:0", trim=1))

    async def retry(on: Store) -> None:
        await on.run(step=steps, status="failed", token="")
        await on.log(steps)
        fields = {"expected": 1, "step": steps - 1, "slim": "{}", "overrides": "", "message": "m"}
        rest = {"grace": 5000, "tokens": 1, "cost": 1, "calls": 1, "events": "[]", "event_count": 1}
        await on.script("retry", "r", *flat(**fields, **rest, lost="", input="", request="q"))

    async def adopt(on: Store) -> None:
        text = "x" * on.args.size
        log = [part for n in range(steps) for part in (str(n), text)]
        outcomes = [part for n in range(steps) for part in (str(n), text[:400])]
        head = flat(v=1, slim="{}")
        for name, part in (("log", log), ("outcomes", outcomes)):
            for page in pages(part):
                await on.script("stage", "r", "digest", name, 600_000, *page, keys=KEYS[:2])
        sizes = (len(head), -steps, -steps, 0)
        await on.script(
            "adopt", "r", "digest", "completed", steps, 5000, 600, "", "[]", 1, *sizes, *head
        )

    async def purge(on: Store) -> None:
        await on.run(step=steps, status="completed", ended=1)
        await on.log(steps)
        await on.script("purge", "r", " ", 2, "", "", keys=KEYS[:2])

    named = {"claim": claim, "commit, an end": end, "commit, trims": trim, "retry": retry}
    more = {"adopt": adopt, "purge": purge}
    return {(name, f"{steps} steps"): play for name, play in {**named, **more}.items()}


def states(size: int) -> dict[tuple[str, str], Play]:
    """Return what depends on how large a run's state is."""
    state = {"step_count": 3, "custom_state": {f"k{n}": ["abc", n] for n in range(size * 50)}}
    slim = json.dumps(state)

    async def first(on: Store) -> None:
        await on.run(status="queued", token="", slim=slim)
        await on.script("claim", "r", 0, "n", 30_000, "w", "")

    async def pause(on: Store) -> None:
        await on.run(token="", slim=slim)
        await on.script("pause", "r", "q", "")

    async def cancel(on: Store) -> None:
        await on.run(token="", slim=slim)
        ending = {**ENDED, "status": "cancelled", "stop_reason": "user_requested"}
        await on.script("cancel", "r", *flat(outcome="{}", note="", request="q", **ending))

    plays = {"claim, the first": first, "pause": pause, "cancel": cancel}
    return {(name, f"{len(slim) // 1000} kB of state"): play for name, play in plays.items()}


def calls(number: int) -> dict[tuple[str, str], Play]:
    """Return what depends on how many tool calls an answer asks for."""
    entries = [part for n in range(number) for part in (f"s:{n}", 1, f"r:{n}", "x" * 1000)]

    async def journal(on: Store) -> None:
        await on.run()
        await on.script("journal", "r", 0, "t", 30_000, 1, "response", "x" * 10_000, *entries)

    async def park(on: Store) -> None:
        await on.run()
        await on.client.hset(f"{RUN}:journal", "response", "x" * 10_000)
        parked = [part for n in range(number) for part in (n, "gpu", "tool", "m" * 800, "", "")]
        fields = {
            "want": "",
            "patience": 60_000,
            "grace": 5000,
            "began": 1,
            "spent": 1,
            "paid": "{}",
        }
        rest = flat(**fields, dropped="", events="[]", event_count=1)
        queues = [RUN, DUE, *(["gpu"] * number)]
        await on.script("park", "r", 0, "t", number, *parked, *rest, keys=queues)
        await on.script("take", "r", 0, 0, "c", 30_000)
        await on.script("keep", "r", 0, 0, "c", 30_000, 1)
        fields = {"record": "x" * 1000, "spent": 1, "lost": "{}", "grace": 5000, "message": "m"}
        await on.script("deliver", "r", 0, 0, "c", *flat(**fields))

    async def claim(on: Store) -> None:
        await on.run(token="")
        held = {"response": "x" * 10_000} | {f"r:{n}": "x" * on.args.result for n in range(number)}
        await on.client.hset(f"{RUN}:journal", mapping=held)
        await on.script("claim", "r", 0, "n", 30_000, "w", "")

    plays = {"journal": journal, "park, take, keep, deliver": park, "claim, a journal": claim}
    return {(name, f"{number} calls"): play for name, play in plays.items()}


def waits(number: int) -> dict[tuple[str, str], Play]:
    """Return what depends on how many tool calls runs wait for, each for so many."""

    async def waiting(on: Store, status: str = "in_progress") -> None:
        calls = range(number)
        wait = {"reason": "calls", "since": 1, "deadline": 4 * 10**12}
        wait["calls"] = [[n, "gpu", "tool"] for n in calls]
        names = {part: 1 for n in calls for part in (f"n:{n}", f"s:{n}", f"o:{n}")}
        fields = {"status": status, "step": 1, "agent": "a", "batch": "b", "token": ""}
        times = {"wait": json.dumps(wait), "v": 3, "execution_started": 1, "updated": 1}
        pipe = on.client.pipeline(transaction=False)
        for n in range(MOST_PER_SHARD):
            key = f"sf:{{s00}}:run:w{n}"
            pipe.hset(key, mapping={**fields, **times, "slim": "{}", "want": "", "lease": 0})
            pipe.hset(f"{key}:journal", mapping={"response": "x", "paid": "{}", **names})
            pipe.zadd(DUE, {f"w{n}": 1})
        await pipe.execute()

    async def rescue_waiting(on: Store) -> None:
        await waiting(on)
        await on.script("rescue", MOST_PER_SHARD, 5000, "0", keys=[DUE])

    def sweep(word: str, status: str) -> Play:
        async def play(on: Store) -> None:
            await waiting(on, status)
            ending = {**ENDED, "status": "cancelled", "stop_reason": "user_requested"}
            fields = json.dumps({**ending, "outcome": "{}", "note": ""})
            await on.script("flag", "b", word, 1, fields if word == "cancel" else "", keys=[DUE])
            ids = [f"w{n}" for n in range(PAGE)]
            await on.script("sweep", "", "b", 1, 5000, *ids, keys=["sf:{s00}:run:w0", DUE])

        return play

    runs = f"runs with {number} calls"
    return {
        ("rescue", f"{MOST_PER_SHARD} {runs}"): rescue_waiting,
        ("sweep, cancel", f"{PAGE} {runs}"): sweep("cancel", "in_progress"),
        ("sweep, pause", f"{PAGE} {runs}"): sweep("pause", "in_progress"),
        ("sweep, resume", f"{PAGE} {runs}"): sweep("resume", "paused"),
    }


def pages_of_runs() -> dict[tuple[str, str], Play]:
    """Return what looks at runs in pages of its own."""

    async def feed_told(on: Store) -> None:
        pipe = on.client.pipeline(transaction=False)
        for n in range(10):
            key = f"sf:{{s00}}:run:a{n}"
            pipe.hset(key, mapping={"status": "in_progress", "step": 1, "agent": "a"})
            pipe.zadd(DUE, {f"a{n}": n + 1})
            for one in range(1000):
                pipe.xadd(f"{key}:events", {"first": one, "events": "x" * on.args.size})
        await pipe.execute()
        for _ in range(20):
            await on.script("feed", 600, JOINED_AT_ONCE, keys=[DUE])

    async def expire(on: Store) -> None:
        pipe = on.client.pipeline(transaction=False)
        for n in range(EXPIRED_AT_ONCE):
            key = f"sf:{{s00}}:run:e{n}"
            for part in ("", ":log", ":journal", ":outcomes", ":lost"):
                pipe.hset(key + part, "x", "y")
            pipe.zadd("sf:{s00}:batch:b:ended", {f"e{n}": n + 1})
        await pipe.execute()
        await on.script("expire", "b", 4 * 10**12, "0", EXPIRED_AT_ONCE, "", keys=[DUE])

    return {
        ("feed", "10 runs, 1000 events each"): feed_told,
        ("expire", f"{EXPIRED_AT_ONCE} runs"): expire,
    }


def shards(args: argparse.Namespace) -> dict[tuple[str, str], Play]:
    """Return what depends on how much a store holds."""

    async def rescue(on: Store) -> None:
        await on.active(args.active)
        await on.script("rescue", MOST_PER_SHARD, 5000, "0", keys=[DUE])

    async def feed(on: Store) -> None:
        await on.active(args.active)
        for _ in range(20):
            await on.script("feed", 600, JOINED_AT_ONCE, keys=[DUE])

    async def courier(on: Store) -> None:
        places = [part for n in range(256) for part in (n, "1-1 1")]
        await on.script("courier", "me", 15_000, *places, keys=["{o}:owner", "{o}:places"])

    async def cache(on: Store) -> None:
        for n in range(2000):
            limit = 10**9 if n < 1999 else 1000  # noqa: PLR2004 - the last one makes room
            key = ("keep", f"{n:064x}", "m", 600_000, limit, "x" * 500)
            await on.script("cache", *key, keys=["{c}:cache"])
        await on.script("cache", "clear", 500, keys=["{c}:cache"])

    sizes = f"{args.active} runs"
    return {
        ("rescue", sizes): rescue,
        ("feed", sizes): feed,
        ("courier", "256 shards"): courier,
        ("cache, keep and clear", "2000 entries"): cache,
    }


async def measure(url: str, args: argparse.Namespace, report: Report) -> None:
    """Play every case, each on an empty Redis."""
    plays = shards(args) | pages_of_runs()
    for steps in args.steps:
        plays |= history(steps)
    for size in args.state:
        plays |= states(size)
    for number in args.calls:
        plays |= calls(number) | waits(number)
    on = Store(url, args)
    await on.client.config_set("slowlog-log-slower-than", 20)
    await on.client.config_set("slowlog-max-len", 10_000)
    for (script, what), play in plays.items():
        found = []
        for _ in range(args.tries):
            await on.client.flushall()
            await on.client.slowlog_reset()
            await play(on)
            found.append(await on.longest())
        report.add({"script": script, "input": what, "longest_ms": min(found)})
    await on.connection.aclose()


def main() -> None:
    """Measure, and print the table."""
    made = parser(__doc__)
    made.add_argument("--steps", type=int, nargs="*", default=[500, 5000])
    made.add_argument("--size", type=int, default=2000, help="bytes of a step in the log")
    made.add_argument("--state", type=int, nargs="*", default=[64, 1024], help="kilobytes")
    made.add_argument("--calls", type=int, nargs="*", default=[256])
    made.add_argument("--result", type=int, default=40_000, help="bytes of a tool call's result")
    made.add_argument("--active", type=int, default=50_000, help="active runs of one shard")
    made.add_argument("--tries", type=int, default=3)
    args = made.parse_args()
    report = begin("scripts", args)
    with redis_server() as (url, _):
        asyncio.run(measure(url, args, report))
    columns = (Column("longest call, ms", "longest_ms", 2),)
    show("scripts", report.rows, ("script", "input"), columns)
    finish(report, args, list)


if __name__ == "__main__":
    main()
