"""A model's service goes away: its runs wait without a slot, and go on when it is back."""

import asyncio
import itertools
from collections.abc import Callable

import orjson
from support.deadlines import wait_until
from support.servers.redis_servers import free_port
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet, RunStatus
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.circuits import ServiceOutage
from stepfleet.orchestrator.store.store import open_store
from stepfleet.worker.runtime.circuits import PROBES
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

RUNS = 12
LONG = 60.0


def outages(url: str) -> list[ServiceOutage]:
    async def read() -> list[ServiceOutage]:
        opened = await open_store(load_settings(redis_url=url))
        try:
            return await opened.circuits.outages()
        finally:
            await opened.aclose()

    return asyncio.run(read())


def test_runs_wait_for_a_service_that_is_out_and_complete_when_it_is_back(
    redis_url: str, start_worker: Callable[..., FleetWorker], commands: CommandLine
) -> None:
    """No attempt is counted and no time limit runs out; status and explain say what is so."""
    port = free_port()
    env = {
        "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
        "STEPFLEET_CIRCUIT_AFTER": "2",
    }
    start_worker(env=env)
    with Fleet(redis_url=redis_url) as fleet:
        batch = fleet.submit_batch(
            [{"input": str(number)} for number in range(RUNS)], agent="plain", time_limit=4.0
        )

        def all_wait() -> bool:
            return sum(one.waiting for one in outages(redis_url)) >= RUNS - PROBES

        wait_until(all_wait, within=LONG, what="all runs waiting for the service")
        [outage] = outages(redis_url)
        assert outage.service == f"http://127.0.0.1:{port}/v1 scripted"

        status = commands("status", STEPFLEET_REDIS_URL=redis_url).stdout
        assert f"{outage.service} is out: " in " ".join(status.split())
        # The others are the probes, or about to wait again.
        said = [
            orjson.loads(
                commands("explain", run_id, "--json", STEPFLEET_REDIS_URL=redis_url).stdout
            )
            for run_id in itertools.islice(batch.run_ids(), PROBES + 1)
        ]
        assert any("step 1 waits since" in one["says"] for one in said)

        with ModelServer(lambda _: Reply("done"), port=port) as server:
            progress = batch.wait(timeout=LONG)
            results = list(batch.results())
            assert len(server.requests) == RUNS
    assert progress.completed == len(results) == RUNS
    assert {one.status for one in results} == {RunStatus.COMPLETED}
    assert all(one.cumulative_execution_seconds < 4 for one in results)
    assert outages(redis_url) == []
