"""What all examples of the protocol's model share: a real store, one event loop, a raw reader."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from redis import Redis
from redis import RedisCluster as NodesOfCluster
from support.protocol.audit import Auditor
from support.protocol.call_model import WaitingModel
from support.protocol.cluster import ClusterAuditor
from support.protocol.model import GRACE, LEASE, MOST_AGAIN, SHARDS, Run
from support.protocol.worker import AGENTS
from support.runs.stored_runs import Bench, bench, with_settings
from support.servers.redis_cluster import RedisCluster

from stepfleet.orchestrator.store.batches.requests import BatchRequests
from stepfleet.orchestrator.store.circuits import Circuits
from stepfleet.orchestrator.store.pace import SweepPace
from stepfleet.orchestrator.store.runs.steps import IsolationMarks
from stepfleet.worker.runtime.rescuer import Rescuer

T = TypeVar("T")


@dataclass
class Rig:
    """What all examples share: one event loop, one open store, one reader of raw records."""

    runner: asyncio.Runner
    bench: Bench
    auditor: Auditor
    configs: list[str]
    examples: int = 0
    operations: int = 0
    told: dict[str, int] = field(default_factory=dict)
    cluster: RedisCluster | None = None

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        # Not `runner.run`: it sets a signal handler for each call, a tenth of all the time.
        return self.runner.get_loop().run_until_complete(work)

    def follow(self, model: WaitingModel) -> None:
        """Take the queues as they are, where the broker is beside the store.

        Each message comes at least once there, in whatever order.
        """
        if self.cluster:
            hints, calls = self.auditor.messages()
            _follow(model.queue, hints)
            _follow(model.call_queue, calls)

    def marks(self) -> IsolationMarks:
        opened = self.bench.opened
        return opened.marks

    def circuits(self) -> Circuits:
        return self.bench.opened.circuits

    @property
    def pace(self) -> SweepPace:
        return SweepPace(self.bench.opened.connection)

    @property
    def requests(self) -> BatchRequests:
        """Requests to whole batches, over the rig's store."""
        return with_settings(self.bench.opened, retention=60, grace=GRACE / 1000).requests

    def rescuer(self, *, long_queue: bool) -> Rescuer:
        opened = self.bench.opened
        made = Rescuer(
            opened.connection,
            opened.keys,
            opened.dispatch,
            grace=GRACE / 1000,
            interval=1.0,
            long_queue=-1 if long_queue else 1_000_000,
            jitter=lambda: 0.5,
        )
        made.again = MOST_AGAIN * SHARDS
        return made


def _follow(expected: list[Any], told: list[Any]) -> None:
    missing = Counter(expected) - Counter(told)
    assert not missing, f"messages were not published: {missing}"
    expected[:] = told


@contextmanager
def cluster_rig(cluster: RedisCluster, broker: str) -> Iterator[Rig]:
    """Open the store on a cluster that is empty, with the broker at that URL."""
    with asyncio.Runner() as runner, ExitStack() as opened:
        first = cluster.masters[0]
        nodes = opened.enter_context(
            NodesOfCluster(host="127.0.0.1", port=first.port, decode_responses=True)
        )
        queues = opened.enter_context(Redis.from_url(broker, decode_responses=True))
        queues.flushdb()
        bench = opened.enter_context(opened_bench(runner, cluster.url, broker_url=broker))
        configs = [runner.run(bench.opened.configs.save(agent.config)) for agent in AGENTS]
        auditor = ClusterAuditor(nodes, queues)
        yield Rig(runner, bench, auditor, configs, cluster=cluster)


@contextmanager
def rig(url: str) -> Iterator[Rig]:
    """Open the store at `url` with times that real time does not reach."""
    with asyncio.Runner() as runner, Redis.from_url(url, decode_responses=True) as client:
        client.flushdb()
        with opened_bench(runner, url) as opened:
            configs = [runner.run(opened.opened.configs.save(agent.config)) for agent in AGENTS]
            yield Rig(runner, opened, Auditor(client), configs)


@contextmanager
def opened_bench(runner: asyncio.Runner, url: str, **settings: Any) -> Iterator[Bench]:
    """Open the store in the runner's loop."""
    times: dict[str, Any] = {"lease": LEASE / 1000, "grace": GRACE / 1000}
    opening = bench(url, shards=SHARDS, connections=1, **times, **settings)
    opened = runner.run(opening.__aenter__())
    try:
        yield opened
    finally:
        runner.run(opening.__aexit__(None, None, None))


def check_as_clients_see_it(rig: Rig, run: Run) -> None:
    """Assert that a run which has ended looks to a client as the model has it."""
    result = rig.do(rig.bench.stored(run.run_id)).result()
    assert result.stop_reason == run.reason
    assert len(result.steps) == len(run.log)
    assert result.usage.total_tokens == sum(step.tokens for step in run.log)
    assert result.usage.llm_calls == sum(step.calls for step in run.log)
    assert result.cost_usd * 4 == sum(step.cost for step in run.log)
    assert result.cumulative_execution_seconds * 2 == sum(step.time for step in run.log)
    assert len(result.lost_attempts) == len(run.ledger)
    told, _ = rig.do(rig.bench.runs.events(run.run_id))
    assert [event["sequence"] for event in told] == list(range(1, run.seq + 1))
    ends = [event for event in told if event["payload"].get("status") == run.status]
    assert ends, "no event tells the end"
