"""Runs that wait for hundreds of tool calls: one look of the rescuer is bounded in calls, too."""

import orjson
from support.runs.stored_runs import bench

from stepfleet.orchestrator.store.lua import run_script

RUNS, CALLS, LOOK = 30, 256, 20
MOST = 1000
"""Calls that one look looks at, but for those of its last run."""


async def test_runs_with_many_calls_are_looked_at_a_part_at_a_time(redis_url: str) -> None:
    """Each call is dispatched once, and the reply says while there is more."""
    async with bench(redis_url, shards=1, grace=600.0) as desk:
        runs = [await desk.create() for _ in range(RUNS)]
        keys = desk.opened.keys
        calls = [(n, "gpu", "tool") for n in range(CALLS)]
        wait = {"reason": "calls", "since": 1, "deadline": 4 * 10**12, "calls": calls}
        fields = ("status", "in_progress", "token", "", "wait", orjson.dumps(wait).decode())
        for run_id in runs:
            await desk.opened.connection.execute("HSET", keys.run(run_id), *fields)
            await desk.opened.connection.execute("ZADD", keys.due(0), 1, run_id)
        seen: list[tuple[str, str]] = []
        more = True
        while more:
            took, calls, hints, owing, limited, *first = await run_script(
                desk.opened.connection, "rescue", [keys.due(0)], LOOK, 600_000, "0"
            )
            assert len(calls) // 6 <= MOST + CALLS
            assert (hints, owing, limited, first) == ([], [], [], [])
            seen += zip(calls[::6], calls[3::6], strict=True)
            more = int(took) >= LOOK
        assert sorted(seen) == sorted((run, str(n)) for run in runs for n in range(CALLS))
