"""What a run takes: in process as a benchmark says, in Redis as is documented."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

from redis.asyncio import Redis
from support.runs.scripted_steps import Script, call, say
from support.runs.tools import look

from stepfleet.orchestrator import Agent, AsyncFleet
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "internals" / "performance.md").read_text(encoding="utf-8")
STEPS = 10
STRATEGIES = ("noop", "react", "chain_of_thought")
AIMS = {"memory": 10.0} | {f"strategy {name}": 50.0 for name in STRATEGIES}
"""Microseconds of one look or turn."""


async def bytes_of(redis_url: str, run_id: str) -> int:
    """Return what Redis holds for one run, its share of common indexes left out."""
    client = Redis.from_url(redis_url)
    try:
        keys = [key async for key in client.scan_iter(f"*{run_id}*")]
        used = [await client.memory_usage(key, samples=0) for key in keys]
    finally:
        await client.aclose()
    assert keys
    return sum(one or 0 for one in used)


def documented(what: str) -> int:
    """Return a row of the page's table of sizes, in bytes."""
    (kilobytes,) = re.findall(rf"^\| {what} \| ([\d.]+) KB \|", PAGE, re.MULTILINE)
    return int(float(kilobytes) * 1000)


async def test_a_run_takes_no_more_of_redis_than_is_documented(redis_url: str) -> None:
    """OBS-10: waiting, and for each step with a tool call and short texts."""
    script = [call(("look", {"what": "a" * 20}), text="Let me look.") for _ in range(STEPS - 1)]
    agent = Agent("looker", model=Script([*script, say("Done.")]), tools=[look])
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(agent, "q" * 100)
        waiting = await bytes_of(redis_url, run_id)
        async with InlineWorker(load_settings(redis_url=redis_url), [agent]) as worker:
            await worker.finish(run_id)
        assert (await fleet.runs.result(run_id)).steps_used == STEPS
        ended = await bytes_of(redis_url, run_id)
    each = (ended - waiting) / STEPS
    assert waiting <= documented("a run that waits, its input 100 characters")
    assert each <= documented("each step with a tool call and short texts")
    # What is documented shall say something: no more than three times what it is.
    assert documented("a run that waits, its input 100 characters") <= 3 * waiting
    assert documented("each step with a tool call and short texts") <= 3 * each


def test_the_overheads_in_process_are_measured_one_by_one(tmp_path: Path) -> None:
    """OBS-07: processor time, the best of three; at most eight times what is aimed at."""
    found = tmp_path / "found.json"
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "overheads.py"),
            *("--turns", "150", "--repeat", "3"),
            "--json",
            found,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows: dict[str, float] = {}
    for row in json.loads(found.read_text())["rows"]:
        rows[row["what"]] = min(row["microseconds"], rows.get(row["what"], math.inf))
    assert set(rows) == {
        *("memory", "memory moved on"),
        *(f"strategy {name}" for name in STRATEGIES),
        *("criteria", "log line", "history"),
    }
    assert all(spent > 0 for spent in rows.values())
    slow = {what: rows[what] for what, aim in AIMS.items() if rows[what] > 8 * aim}
    assert not slow
