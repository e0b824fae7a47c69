"""Archives out of reach, full or damaged, and a full Redis: nothing is lost, errors name the file."""

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs.archives import (
    archive,
    check_files,
    end,
    ended,
    ended_batch,
    files,
    in_redis,
    listed,
    move,
    seen,
)
from support.servers.object_storage import ObjectStorage, object_storage
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator.archive import places
from stepfleet.orchestrator.errors import ArchiveError, SerializationError
from stepfleet.orchestrator.store.runs import archiving


async def test_a_storage_that_is_killed_loses_nothing_and_all_goes_on_after_it(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-05: S3 over HTTP; what is archived cannot be read meanwhile, and what is live can."""
    monkeypatch.setattr(places, "CALL_SECONDS", 8.0)
    with object_storage(tmp_path) as storage:
        url = storage.url(f"{storage.bucket('kept')}/runs")
        async with archive(redis_url, url) as (desk, fleet):
            batch = await ended_batch(desk, fleet, 3)
            there = await ended(desk)
            assert (await move(desk)).runs == 4
            before = [await seen(fleet, one) for one in (there, *batch.run_ids())]
            storage.process.send_signal(signal.SIGSTOP)
            try:
                live = await ended(desk)
                monkeypatch.setattr(places, "CALL_SECONDS", 0.3)
                await desk.opened.connection.execute("HDEL", "sf:{archive}:state", "error")
                with pytest.raises(ArchiveError, match="kept/runs"):
                    await desk.opened.archiving.run(0, lambda _: None)
                assert await in_redis(desk, [live]) == [live]
                await check_out_of_reach(desk, batch.id, there, live)
            finally:
                storage.process.send_signal(signal.SIGCONT)
            monkeypatch.setattr(places, "CALL_SECONDS", 8.0)
            assert (await move(desk)).runs == 1
            after = [await seen(fleet, one) for one in (there, *batch.run_ids())]
            assert after == before
            assert (await fleet.runs.result(live)).success
