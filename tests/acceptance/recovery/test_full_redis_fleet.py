"""A fleet whose Redis is full for longer than a lease: answers that are held are not paid again."""

from collections.abc import Callable

import redis
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Agent, Fleet, RunStatus
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

LONG = 60.0
LEASE = 3
RUNS = 60
SOON, LATE = 2.0, 12.0
"""Seconds of a model's answer: it comes while Redis is full, or when it has room again."""
AGENT = Agent("plain", model="openai:scripted")


def answers(request: RequestRecord) -> Reply:
    """Answer every other question soon, the others late."""
    soon = int(request.key.split()[1]) % 2
    return Reply(f"answer to {request.key}", latency=SOON if soon else LATE)


def test_a_redis_that_is_full_for_longer_than_a_lease_costs_no_call(
    own_redis: Callable[..., RedisServer],
    start_worker: Callable[..., FleetWorker],
    model: ModelServer,
) -> None:
    """Sixty runs in two workers, each with its one call under way: sixty calls in the end.

    A third worker, which holds nothing, looks for runs to rescue as soon as there is room.
    """
    server = own_redis()
    model.follow(answers)
    env = {"STEPFLEET_LEASE": str(LEASE), "STEPFLEET_SLOTS": str(RUNS)}
    workers = [start_worker(server.url, name=name, env=env) for name in ("w1", "w2")]
    workers.append(start_worker(server.url, name="idle", options=("-Q", "other"), env=env))
    lines = [{"input": f"question {n}"} for n in range(RUNS)]
    with Fleet(server.url) as fleet, redis.Redis.from_url(server.url) as client:
        batch = fleet.submit_batch(lines, agent=AGENT)
        wait_until(lambda: len(model.requests) == RUNS, within=LONG, what="the calls under way")
        client.config_set("maxmemory", "1mb")
        heard = "Redis refuses commands"
        wait_until(lambda: any(heard in one.log for one in workers), within=LONG, what=heard)
        began = client.time()[0]
        wait_until(lambda: client.time()[0] > began + 2 * LEASE, within=LONG, what="two leases")
        client.config_set("maxmemory", "0")
        results = list(batch.results())
    assert [one.status for one in results] == [RunStatus.COMPLETED] * RUNS
    lost = [one for result in results for one in result.lost_attempts]
    assert (len(model.requests), lost) == (RUNS, []), [one.log for one in workers]
