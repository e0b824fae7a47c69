"""What all examples of the protocol's model share: a real store, one event loop, a raw reader."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from protocol_audit import Auditor
from protocol_model import GRACE, LEASE, SHARDS, Run
from protocol_worker import AGENTS
from redis import Redis
from stored_runs import Bench, bench

from stepfleet.worker.rescuer import Rescuer

T = TypeVar("T")


@dataclass
class Rig:
    """What all examples share: one event loop, one open store, one reader of raw records."""

    runner: asyncio.Runner
    bench: Bench
    auditor: Auditor
    configs: list[str]
    operations: int = 0
    told: dict[str, int] = field(default_factory=dict)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def rescuer(self, *, long_queue: bool) -> Rescuer:
        opened = self.bench.opened
        return Rescuer(
            opened.connection,
            opened.keys,
            opened.dispatch,
            grace=GRACE / 1000,
            interval=1.0,
            long_queue=-1 if long_queue else 1_000_000,
            jitter=lambda: 0.5,
        )


@contextmanager
def rig(url: str) -> Iterator[Rig]:
    """Open the store at `url` with times that real time does not reach."""
    with asyncio.Runner() as runner, Redis.from_url(url, decode_responses=True) as client:
        client.flushdb()
        opening = bench(url, lease=LEASE / 1000, grace=GRACE / 1000, shards=SHARDS, connections=1)
        opened = runner.run(opening.__aenter__())
        try:
            configs = [runner.run(opened.opened.configs.save(agent.config)) for agent in AGENTS]
            yield Rig(runner, opened, Auditor(client), configs)
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
