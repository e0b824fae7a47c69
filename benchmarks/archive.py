"""The archive of ended runs: memory that it frees, its speed, and reads of what is there.

python benchmarks/archive.py                                # 100,000 runs of 4 steps, a folder
python benchmarks/archive.py --runs 10000 --url s3          # a server of S3 (moto) of its own
python benchmarks/archive.py --agent reader --url file:///mnt/archive --markdown

A real worker does 500 runs with simulated answers; all others are copies of them under new ids and
times (ended_runs.py says what a copy has). Half are in batches of 1,000, unless `--batches` says
how many there are. A process of its own archives them all, in a fleet that has had an archive for
long (the first time of all it waits 4 s until all clients know).

`stall` is how late the event loop was with a timer of 5 ms; `ping` what another process waits
meanwhile for a PING every 2 ms, and `idle` the same before; the longest command is Redis's own
account (slow log). `MB peak` is resident memory of the process; it has `MB before` with the
program's code alone.

Reads are the same ones before and after: `new` is a client that connects and knows nothing, `again`
its second read of the same. Times are medians, in ms.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from control import IDLE_SECONDS, pinged, spread
from ended_runs import ROWS, Ended, fill, kinds_of, others, play
from memory import AGENTS
from processes import ended, redis_server, until
from readings import peak_memory
from redis import Redis
from reports import Column, Report, begin, finish, parser, progress, show

from stepfleet import AsyncFleet
from stepfleet.orchestrator.settings.settings import Settings, load_settings
from stepfleet.orchestrator.store.keys import ARCHIVE_STATE, Keys
from stepfleet.orchestrator.store.runs.archiving import Archived
from stepfleet.orchestrator.store.runs.listing import Cursor
from stepfleet.orchestrator.store.store import open_store

SAMPLE = 20
COMMANDS, BATCHES = 3, 3
PAGE = 50
LAG_SECONDS = 0.005
LOGGED_MICROSECONDS = 1_000
MEASURED = 1_000
"""Runs of which each key's memory is asked for."""
_MS, _MB = 1000, 1_000_000


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    add = made.add_argument
    add("--runs", type=int, default=100_000)
    add("--batches", type=int, help=f"batches of {ROWS} rows; half of the runs without it")
    add("--steps", type=int, default=4)
    add("--agent", choices=list(AGENTS), default="runner", help="reader: results of 8 kB")
    add("--url", help="of the archive, or s3 for a server of its own; a new folder without it")
    add("--markdown", action="store_true", help="print the tables for documents")
    found = made.parse_args()
    if found.batches is None:
        found.batches = found.runs // 2 // ROWS
    if not ROWS * found.batches <= found.runs:
        made.error(f"--batches {found.batches}: these have more than {found.runs} runs")
    return found


@contextmanager
def place(given: str | None) -> Iterator[str]:
    """Yield the URL of an archive; `s3` is a server that ends with this."""
    with tempfile.TemporaryDirectory(prefix="sf-bench-") as folder:
        if given != "s3":
            yield given or f"file://{folder}/archive"
            return
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        with (
            (Path(folder) / "log").open("w") as log,
            ended(subprocess.Popen(command, stdout=log, stderr=log, text=True)),
        ):
            until(lambda: _address(Path(folder) / "log"))
            found = _address(Path(folder) / "log")
            urlopen(Request(f"{found}/runs", method="PUT"), timeout=60).close()  # noqa: S310 - ours
            yield f"s3://runs/archive?endpoint_url={found}&key=none&secret=none"


def _address(log: Path) -> str:
    found = [word for word in log.read_text().split() if word.startswith("http://127.0.0.1:")]
    return found[0] if found else ""


# ------------------------------------------------------------------------------------- moving


def archive(url: str, archive_url: str, told: Connection) -> None:
    """Archive all runs; tell what it took."""
    told.send(asyncio.run(_archive(load_settings(redis_url=url, archive_url=archive_url))))


async def _archive(settings: Settings) -> dict[str, Any]:
    store = await open_store(settings)
    lags: list[float] = []
    watching = asyncio.create_task(_watch(lags))
    before, cpu, began = peak_memory(os.getpid()), time.process_time(), time.monotonic()
    moved = await store.archiving.run(0, _report)
    seconds, used = time.monotonic() - began, time.process_time() - cpu
    watching.cancel()
    await store.aclose()
    return {
        **moved.to_dict(),
        "seconds": seconds,
        "cpu": used,
        "per_second": moved.runs / seconds,
        "mb_before": before / _MB,
        "mb_peak": peak_memory(os.getpid()) / _MB,
        "stall_p99": statistics.quantiles(lags, n=100)[98],
        "stall_max": max(lags),
    }


def _report(done: Archived) -> None:
    progress.print(f"archived {done.runs:,} runs")


async def _watch(lags: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(LAG_SECONDS)
        lags.append((time.perf_counter() - began - LAG_SECONDS) * _MS)


def moved(url: str, archive_url: str, store: Redis) -> dict[str, Any]:
    """Archive in a process of its own; return what it took, with Redis's CPU and stalls."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    store.hset(ARCHIVE_STATE, "gathered", 1)
    store.slowlog_reset()
    store.config_set("slowlog-log-slower-than", LOGGED_MICROSECONDS)
    before = store.info("cpu")
    with pinged(url) as waits:
        process = context.Process(target=archive, args=(url, archive_url, theirs))
        process.start()
        theirs.close()
        row = ours.recv()
        process.join()
    after = store.info("cpu")
    slow = [(one["duration"] / 1000, one["command"][:60]) for one in store.slowlog_get(10_000)]
    store.config_set("slowlog-log-slower-than", -1)
    longest = max(slow, default=(0.0, ""))
    progress.print(f"longest command: {longest[0]:.1f} ms: {longest[1]}")
    spent = sum(after[one] - before[one] for one in ("used_cpu_user", "used_cpu_sys"))
    return {**row, "redis_cpu": spent, "longest_ms": longest[0], **spread(waits)}


# -------------------------------------------------------------------------------------- memory


def memory(store: Redis, keys: Keys, runs: Ended, total: int, empty: int) -> dict[str, float]:
    """Return bytes per run: of `used_memory` above an empty server's, and of each kind of key."""
    sample = runs.single[:: max(1, len(runs.single) // MEASURED)]
    kinds = Counter[str]()
    for kind, size in others(store):
        kinds[kind] += size
    return {
        **{f"run's {kind}": size for kind, size in kinds_of(store, keys, sample).items()},
        **{kind: size / total for kind, size in sorted(kinds.items())},
        "used_memory": (store.info("memory")["used_memory"] - empty) / total,
    }


# --------------------------------------------------------------------------------------- reads


async def reads(settings: Settings, runs: Ended) -> dict[str, float]:
    """Return the medians of all reads, in ms."""
    some = runs.single[:: max(1, len(runs.single) // SAMPLE)][:SAMPLE]
    found: dict[str, list[float]] = {}
    for run_id in some:
        await _twice(settings, found, "show", partial(_show, run_id))
    for run_id in some[:COMMANDS]:
        taken = await asyncio.to_thread(_command, settings, run_id)
        found.setdefault("stepfleet show", []).append(taken)
    for batch_id in runs.batches[:BATCHES]:
        await _twice(settings, found, f"results of {ROWS} rows", partial(_results, batch_id))
    for at in range(BATCHES):
        cursor = await _cursor(settings, runs.single[len(runs.single) // 2 + at])
        await _twice(settings, found, "ls, first page", partial(_page, None))
        await _twice(settings, found, "ls, after half of the runs", partial(_page, cursor))
    return {name: statistics.median(taken) for name, taken in found.items()}


async def _twice(
    settings: Settings,
    found: dict[str, list[float]],
    name: str,
    read: Callable[[AsyncFleet], Awaitable[Any]],
) -> None:
    fleet, began = AsyncFleet(settings=settings), time.perf_counter()
    try:
        for word in ("new", "again"):
            await read(fleet)
            found.setdefault(f"{name}, {word}", []).append((time.perf_counter() - began) * _MS)
            began = time.perf_counter()
    finally:
        await fleet.aclose()


async def _show(run_id: str, fleet: AsyncFleet) -> None:
    await fleet.runs.show(run_id)


async def _page(cursor: str | None, fleet: AsyncFleet) -> None:
    page = await fleet.runs.page(limit=PAGE, cursor=cursor)
    if len(page.runs) != PAGE:
        raise RuntimeError(f"a page of {len(page.runs)} runs, not {PAGE}")


async def _results(batch_id: str, fleet: AsyncFleet) -> None:
    batch = await fleet.batches.get(batch_id)
    count = [result.status async for result in batch.results()]
    if len(count) != ROWS:
        raise RuntimeError(f"{len(count)} results of {ROWS}")


async def _cursor(settings: Settings, run_id: str) -> str:
    async with AsyncFleet(settings=settings) as fleet:
        made = (await fleet.runs.show(run_id)).state.info.started_at
    return str(Cursor(round(made.timestamp() * _MS), run_id))


def _command(settings: Settings, run_id: str) -> float:
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "stepfleet.orchestrator.cli", "show", run_id],
        env={**os.environ, "STEPFLEET_REDIS_URL": settings.store},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return (time.perf_counter() - began) * _MS


async def restored(settings: Settings, batch_id: str) -> float:
    """Bring a batch back; return the seconds that it took."""
    store = await open_store(settings)
    try:
        manifest = await store.batches.get(batch_id)
        began = time.perf_counter()
        if await store.returning.restore_batch(manifest) != ROWS:
            raise RuntimeError("not all of the batch came back")
        return time.perf_counter() - began
    finally:
        await store.aclose()


# ---------------------------------------------------------------------------------------- all


def measure(args: argparse.Namespace, report: Report) -> None:
    """Fill, read, archive, read again."""
    with (
        place(args.url) as archive_url,
        redis_server() as (url, _),
        Redis.from_url(url, decode_responses=True) as store,
    ):
        empty, began = store.info("memory")["used_memory"], time.monotonic()
        runs = fill(url, play(url, args.agent, args.steps, archive_url), args.runs, args.batches)
        progress.print(f"{args.runs:,} copies in {time.monotonic() - began:.0f} s")
        settings = load_settings(redis_url=url)
        keys = Keys(int(store.get("sf:shards")))
        with pinged(url) as idle:
            time.sleep(IDLE_SECONDS)
        before, earlier = (
            memory(store, keys, runs, args.runs, empty),
            asyncio.run(reads(settings, runs)),
        )
        row = moved(url, archive_url, store)
        row |= {f"idle_{name}": one for name, one in spread(idle).items()}
        after, later = (
            memory(store, keys, runs, args.runs, empty),
            asyncio.run(reads(settings, runs)),
        )
        row |= {"bytes_run": row["bytes"] / row["runs"]}
        row |= {"to_redis": row["bytes_run"] / before["used_memory"]}
        if runs.batches:
            away = load_settings(redis_url=url, archive_url=archive_url)
            row["restore"] = asyncio.run(restored(away, runs.batches[-1]))
    report.add({"table": "moving", **row})
    for table, old, new in (("memory", before, after), ("reads", earlier, later)):
        for name in {**old, **new}:
            pair = old.get(name, 0.0), new.get(name, 0.0)
            ratio = pair[1] / pair[0] if pair[0] else None
            what = {"table": table, "what": name, "before": pair[0], "after": pair[1]}
            report.add({**what, "ratio": ratio})


MOVING = (
    (
        *(Column("runs", "runs", 0), Column("s", "seconds", 1, spread=True)),
        *(Column("runs/s", "per_second", 0, spread=True), Column("CPU s", "cpu", 1, spread=True)),
        *(Column("Redis CPU s", "redis_cpu", 1, spread=True), Column("MB before", "mb_before", 0)),
        *(Column("MB peak", "mb_peak", 0), Column("files", "files", 0)),
        *(Column("bytes/run", "bytes_run", 0), Column("to Redis", "to_redis", 3)),
    ),
    (
        *(Column("stall p99 ms", "stall_p99", 1), Column("max", "stall_max", 0)),
        *(Column("ping p99 ms", "ping_p99", 1), Column("max", "ping_max", 0)),
        *(Column("idle p99", "idle_ping_p99", 1), Column("max", "idle_ping_max", 0)),
        Column("longest command ms", "longest_ms", 1),
        Column("restore of a batch s", "restore", 1, spread=True),
    ),
)


def pairs(digits: int) -> tuple[Column, ...]:
    """Return the columns of what there is before and after."""
    sides = (Column(name, name, digits, spread=True) for name in ("before", "after"))
    return (Column("", "what"), *sides, Column("ratio", "ratio", 2, spread=True))


def main() -> None:
    """Measure and print."""
    args = arguments()
    report = begin("archive", args)
    for _ in range(args.repeat):
        measure(args, report)
    tables = [
        *(("Archiving", "moving", columns) for columns in MOVING),
        ("Redis, bytes per run", "memory", pairs(0)),
        ("Reads in ms: from Redis, and from the archive", "reads", pairs(1)),
    ]
    for title, name, columns in tables:
        rows = [{"what": "", **row} for row in report.rows if row["table"] == name]
        show(title, rows, ("what",), columns, markdown=args.markdown)
    finish(report, args, list)


if __name__ == "__main__":
    main()
