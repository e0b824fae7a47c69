"""Reads the tree of runs below a run: level by level, bounded, whatever the runs contain."""

import asyncio
from collections.abc import Sequence

from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.run.summary import RunSummary, RunTree
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.records.compression import unpacked_within
from stepfleet.orchestrator.store.runs.links import Links
from stepfleet.orchestrator.store.runs.listing import RunLists
from stepfleet.orchestrator.store.runs.reading import unknown_run

MOST_RUNS = 1_000
PAGE = 8
"""Steps of a run that are read at once."""
LARGEST_STEP = 4_194_304


class RunTrees:
    """Reads trees of one store."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._lists = RunLists(connection, keys)
        self._links = Links(connection, keys)

    async def read(self, run_id: str, limit: int) -> RunTree:
        """Return the run with up to `limit` runs below it, those of upper levels first.

        Raises `ConfigurationError` for an unknown run, `StoreError`.
        """
        found = await self._lists.summaries([run_id])
        if not found:
            raise unknown_run(run_id)
        runs = {run_id: found[0]}
        below: dict[str, Sequence[str]] = {}
        left_out: dict[str, int] = {}
        level = [run_id]
        while level:
            following: list[str] = []
            for one in level:
                ids = [child for child in await self._started(runs[one]) if child not in runs]
                taken = ids[: max(limit + 1 - len(runs), 0)]
                summaries = await self._lists.summaries(taken)
                runs |= {child.run_id: child for child in summaries}
                below[one] = [child.run_id for child in summaries]
                left_out[one] = len(ids) - len(taken)
                following += below[one]
            level = following
        return _tree(run_id, runs, below, left_out)

    async def _started(self, run: RunSummary) -> list[str]:
        """Return the runs that calls of a run have started, each once, in the order of calls."""
        key, ids = self._keys.run(run.run_id), []
        for at in range(0, run.steps, PAGE):
            numbers = range(at, min(at + PAGE, run.steps))
            sizes = await self._connection.execute_all(
                *(("HSTRLEN", f"{key}:log", number) for number in numbers)
            )
            small = [n for n, size in zip(numbers, sizes, strict=True) if 0 < size <= LARGEST_STEP]
            if small:
                stored = await self._connection.execute("HMGET", f"{key}:log", *small)
                ids += await asyncio.to_thread(_runs_in, stored)
        ids += await self._links.started(run.run_id)
        return list(dict.fromkeys(ids))


def _runs_in(steps: Sequence[str | None]) -> list[str]:
    """Return the ids of runs in committed steps; none of a step that cannot be read."""
    ids: list[str] = []
    for stored in steps:
        try:
            step = exact_json.loads(
                unpacked_within(LARGEST_STEP * 4, stored or "{}"), constants=True
            )
            calls = step["result"]["tool_calls"]
            ids += [call["run"]["run_id"] for call in calls if call.get("run")]
        except (SerializationError, ValueError, LookupError, TypeError):  # of another version
            continue
    return [one for one in ids if one]


def _tree(
    run_id: str,
    runs: dict[str, RunSummary],
    below: dict[str, Sequence[str]],
    left_out: dict[str, int],
) -> RunTree:
    return RunTree(
        run=runs[run_id],
        below=tuple(_tree(one, runs, below, left_out) for one in below[run_id]),
        left_out=left_out[run_id],
    )
