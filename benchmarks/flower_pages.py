"""How long pages of runs take in Flower, and what Flower's process and the lists need for them.

python benchmarks/flower_pages.py                      # 100,000 runs on a server of its own
python benchmarks/flower_pages.py --runs 1000 --tries 3
python benchmarks/flower_pages.py --browser            # in Chromium, until rows are painted

Runs are created by the product's own script and then ended directly in their records: one in a
hundred has failed, twenty of these with the error that is searched for; all belong to one batch. A
real `stepfleet flower` answers over HTTP; a page is read through it `--tries` times and the median
counts. Rare ones are followed by `next` until twenty runs are found. `blocked` is the longest
single call that Redis noted (SLOWLOG) while the pages were read.
"""

import argparse
import asyncio
import base64
import os
import statistics
import subprocess
import sys
import time
from http.client import HTTPConnection
from typing import Any, Self
from urllib.parse import urlencode

import orjson
import psutil
import redis
from page_loads import chromium, opened
from processes import redis_server, until
from reports import Column, Report, begin, finish, parser, show

from stepfleet import Agent, AsyncFleet, Message
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.runs.submission import NewRun

AUTH = "bench:pages"
RARE = "no such customer"
RARE_RUNS = 20
ONE_IN = 100
AT_ONCE = 500
LONGEST = 120.0


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    made.add_argument("--runs", type=int, default=100_000, help="runs that are there")
    made.add_argument("--tries", type=int, default=9, help="readings of each page")
    made.add_argument("--browser", action="store_true", help="measure the pages in Chromium")
    made.add_argument("--port", type=int, default=15_555, help="where Flower listens")
    return made.parse_args()


async def fill(url: str, count: int) -> str:
    """Create the runs, end them, and return the batch."""
    agent = Agent("clerk", model="openai:none")
    async with AsyncFleet(url) as fleet:
        batch = await fleet.submit_batch([{"id": "0", "input": "x"}], agent=agent)
        store = await store_of(fleet)
        execute, keys = store.connection.execute_all, store.keys
        for first in range(1, count, AT_ONCE):
            rows = range(first, min(first + AT_ONCE, count))
            runs = [
                NewRun(
                    run_id=run_id_of(batch.id, row),
                    agent="clerk",
                    config=agent.config.digest,
                    messages=(Message.user("x"),),
                    max_steps=10,
                    batch_id=batch.id,
                    row=row,
                    tenant=f"t{row % 7}",
                )
                for row in rows
            ]
            await store.submission.create_all(runs)
            commands: list[tuple[Any, ...]] = []
            for row, run in zip(rows, runs, strict=True):
                reason = "error" if row % ONE_IN == 1 else "completed"
                status = "failed" if reason == "error" else "completed"
                error = "" if status == "completed" else f"429 too many requests {row}"
                # The oldest ones: the others are looked at before them.
                error = RARE if error and row < RARE_RUNS * ONE_IN else error
                fields = ("status", status, "stop_reason", reason, "error", error)
                tag = keys.tag(keys.shard_of(run.run_id))
                created = 1_700_000_000_000 + row
                times = ("created", created, "updated", created, "ended", created)
                commands += [
                    ("HSET", keys.run(run.run_id), *fields, *times),
                    ("ZREM", f"{tag}runs:queued", run.run_id),
                    ("ZADD", f"{tag}runs:{reason}", created, run.run_id),
                    ("ZREM", f"{tag}due", run.run_id),
                ]
            await execute(*commands)
        await execute(("HSET", keys.manifest(batch.id), "rows", count, "total", count))
        return batch.id


class Flower:
    """A `stepfleet flower` process, and its pages."""

    def __init__(self, url: str, port: int) -> None:
        env = {**os.environ, "STEPFLEET_REDIS_URL": url, "STEPFLEET_FLOWER_BASIC_AUTH": AUTH}
        command = [
            sys.executable,
            "-m",
            "stepfleet.orchestrator.cli",
            "flower",
            "--port",
            str(port),
        ]
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.port = port

    def __enter__(self) -> Self:
        """Return when it answers."""
        until(lambda: self.is_up, within=LONGEST)
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(LONGEST)

    @property
    def is_up(self) -> bool:
        """Whether it answers."""
        try:
            return "runs" in self.page(limit="1")
        except OSError:
            return False

    @property
    def megabytes(self) -> float:
        """Its resident memory."""
        return float(psutil.Process(self.process.pid).memory_info().rss / 1e6)

    def page(self, **query: str) -> dict[str, Any]:
        """Return a page of runs."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=LONGEST)
        headers = {"Authorization": f"Basic {base64.b64encode(AUTH.encode()).decode()}"}
        connection.request("GET", f"/api/stepfleet/runs?{urlencode(query)}", headers=headers)
        answer: dict[str, Any] = orjson.loads(connection.getresponse().read())
        connection.close()
        return answer


def timed(flower: Flower, tries: int, *, whole: bool = False, **query: str) -> dict[str, Any]:
    """Return the time of a page in ms, or of all until twenty runs are found, and what it has."""
    times, longest, pages, found = [], 0.0, 0, 0
    for _ in range(tries):
        begun, cursor, pages, found = time.perf_counter(), {}, 0, 0
        while True:
            one = time.perf_counter()
            page = flower.page(**query, **cursor)
            longest = max(longest, time.perf_counter() - one)
            pages, found = pages + 1, found + len(page["runs"])
            if not whole or found >= RARE_RUNS or not page["next"]:
                break
            cursor = {"cursor": page["next"]}
        times.append(time.perf_counter() - begun)
    median = statistics.median(times)
    return {"ms": median * 1e3, "longest_ms": longest * 1e3, "pages": pages, "found": found}


def measure(args: argparse.Namespace, report: Report) -> None:
    """Fill a store, and read its pages."""
    with redis_server() as (url, _), redis.Redis.from_url(url) as store:
        batch = asyncio.run(fill(url, args.runs))
        lists = sum(store.memory_usage(key, samples=0) for key in store.scan_iter("sf:*:runs:*"))
        with Flower(url, args.port) as flower:
            before = flower.megabytes
            store.config_set("slowlog-log-slower-than", 200)
            store.slowlog_reset()
            cursor = ""
            for _ in range(49):
                cursor = flower.page(**({"cursor": cursor} if cursor else {}))["next"] or ""
            if args.browser:
                of_browser(report, args, flower, batch, cursor)
            else:
                of_api(report, args, flower, batch, cursor)
            slowest = max((one["duration"] for one in store.slowlog_get(1000)), default=0)
            report.details = {
                "blocked_ms": slowest / 1e3,
                "flower_mb_before": before,
                "flower_mb_after": flower.megabytes,
                "bytes_of_lists_per_run": lists / args.runs,
            }


def of_api(
    report: Report, args: argparse.Namespace, flower: Flower, batch: str, cursor: str
) -> None:
    """Read pages of the API."""
    cases: dict[str, dict[str, str]] = {
        "first page": {},
        "50th page": {"cursor": cursor},
        "500 runs": {"limit": "500"},
        "failed": {"status": "failed"},
        "one tenant": {"tenant": "t3"},
        "failed with a rare error": {"status": "failed", "error": RARE},
        "a rare error": {"error": RARE},
        "a batch": {"batch": batch},
        "a batch's rare error": {"batch": batch, "status": "failed", "error": RARE},
    }
    for what, query in cases.items():
        whole = "rare" in what
        found = timed(flower, args.tries, whole=whole, **query)
        report.add({"what": what, "runs": args.runs, **found})


def of_browser(
    report: Report, args: argparse.Namespace, flower: Flower, batch: str, cursor: str
) -> None:
    """Open pages in Chromium: each in a new profile first, then again with its files kept."""
    run = flower.page(limit="1")["runs"][0]["run_id"]
    cases = {
        "runs": "/runs",
        "runs, 50th page": f"/runs?{urlencode({'cursor': cursor})}",
        "runs that failed": "/runs?status=failed",
        "a run": f"/runs/{run}",
        "batches": "/batches",
        "a batch": f"/batches/{batch}",
        "approvals": "/approvals",
        "fleet": "/fleet",
        "costs": "/costs",
    }
    with chromium() as browser:
        for what, path in cases.items():
            address = f"http://127.0.0.1:{flower.port}{path}"
            for state, found in opened(browser, AUTH, address, args.tries).items():
                report.add({"what": f"{what}, {state}", "runs": args.runs, **found})


def main() -> None:
    """Measure, print, and write the files."""
    args = arguments()
    report = begin("flower_pages", args)
    for _ in range(args.repeat):
        measure(args, report)
    columns = (
        [
            Column("page", "what"),
            Column("rows ms", "ms", 0, spread=True),
            Column("longest", "longest_ms", 0),
            Column("document", "document_ms", 0),
            Column("files", "files_ms", 0),
            Column("API", "api_ms", 0),
        ]
        if args.browser
        else [
            Column("page", "what"),
            Column("ms", "ms", 1, spread=True),
            Column("longest", "longest_ms", 1),
            Column("pages", "pages", 0),
            Column("runs", "found", 0),
        ]
    )
    show(f"Pages in Flower over {args.runs:,} runs", report.rows, ("what",), columns)
    for name, value in report.details.items():
        print(f"{name}: {value:.1f}")
    finish(report, args, list)


if __name__ == "__main__":
    main()
