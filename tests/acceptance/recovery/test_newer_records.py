"""A worker amid a newer version's records of every kind: it leaves them, calmly and whole.

The store of `earlier_records.json`, with a field in each record that this version does not know,
and runs of the next version. Then the fields go again, as if a worker that knows them took over.
"""

import runpy
from collections.abc import Callable
from typing import Any, cast

import orjson
import pytest
from redis import Redis
from support.deadlines import wait_until
from support.runs.dumped_records import AGENTS, OUTPUTS, read_in, run
from support.workers.fleet_workers import FleetWorker

from stepfleet import Fleet
from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.records.base import SCHEMA_VERSION
from stepfleet.orchestrator.store.compression import packed, unpacked
from stepfleet.worker.testing import ModelServer

LONG = 90.0
NEWS = "news_of_the_next_version"
FOLLOW_UPS = "sf:follow-ups"
KEY_PARTS = 3  # sf:{s00}:run:<id>
READY = ("look-mid", "look-queued", "limited-0", "render-cat")
"""Runs of the dump that a worker takes at once, steps and a tool call."""
QUICK = {"STEPFLEET_AGENTS": str(AGENTS), "STEPFLEET_GRACE": "0.5"}


class Newer:
    """Gives records of a store a field of the next version, and takes it away."""

    def __init__(self, store: Redis) -> None:
        self._store = store
        self.records = 0

    def runs(self) -> list[str]:
        """Return the keys of all runs."""
        keys = (key.decode() for key in self._store.scan_iter("sf:*:run:*", count=1000))
        return [key for key in keys if key.count(":") == KEY_PARTS]

    def become(self, *, newer: bool) -> None:
        """Rewrite what hashes say; runs have the next version from here on, or ours again."""
        for key in self._store.scan_iter("sf:*", count=1000, _type="hash"):
            found = cast("dict[bytes, bytes]", self._store.hgetall(key))
            for name, value in found.items():
                if (made := self._rewritten(value, newer=newer)) != value:
                    self._store.hset(key, name, made)
                    self.records += 1
        for key in self.runs():
            self._store.hset(key, "v", SCHEMA_VERSION + newer)

    @staticmethod
    def _rewritten(value: bytes, *, newer: bool) -> bytes:
        try:
            found = orjson.loads(plain := unpacked(value.decode()))
        except (ValueError, SerializationError):
            return value
        if not isinstance(found, dict) or (NEWS in found) == newer:
            return value
        text = orjson.dumps({**found, NEWS: "kept"} if newer else _without_news(found)).decode()
        return text.encode() if plain == value else packed(text).encode()

    def kept(self) -> dict[str, Any]:
        """Return what steps have written: logs, journals and outcomes, and where runs are."""
        found: dict[str, Any] = {}
        for key in self.runs():
            for part in ("log", "journal", "outcomes"):
                found[f"{key}:{part}"] = self._store.hgetall(f"{key}:{part}")
            found[key] = self._store.hmget(key, "ended", "step", "v", "slim", "config")
        return found


def _without_news(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != NEWS}


def test_a_worker_leaves_newer_records_of_every_kind_and_nothing_is_lost(
    redis_url: str, model: ModelServer, start_worker: Callable[..., FleetWorker], fleet: Fleet
) -> None:
    """OPS-04, SER-24: no call is made, no step written, no error logged; all complete later."""
    read_in(redis_url)
    model.follow(runpy.run_path(str(AGENTS))["rules"])
    with Redis.from_url(redis_url) as store:
        newer = Newer(store)
        newer.become(newer=True)
        assert newer.records > len(newer.runs())
        before, waited = newer.kept(), store.zrange(FOLLOW_UPS, 0, -1)
        worker = start_worker(options=("-Q", "stepfleet,gpu"), env=QUICK)

        def tried(name: str) -> bool:
            return f"run {run(name)} is left to other workers" in worker.log

        wait_until(lambda: all(map(tried, READY)), within=LONG, what="refusals")
        with pytest.raises(SerializationError, match="upgrade this worker or client"):
            fleet.runs.show(run("look-mid"))
        fleet.overview()
        fleet.batches.newest()
        fleet.approvals.all()
        assert newer.kept() == before
        assert not model.requests
        assert "Traceback" not in worker.log
        assert "ERROR" not in worker.log
        assert worker.log.count("WARNING/MainProcess] run ") == 1, "once, and not for each run"

        assert store.zrange(FOLLOW_UPS, 0, -1) == waited != []
        newer.become(newer=False)
        left = {name: OUTPUTS[name] for name in ("look-mid", "look-queued", "look-flaky")}
        results = {name: fleet.runs.wait(run(name), timeout=LONG).output for name in left}
    assert results == left
