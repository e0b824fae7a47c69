"""A Redis that loses what it had acknowledged: every run ends, and what is left is sound.

Under `appendfsync everysec` a server's end may take a second of commits with it, and a replica that
is promoted may be behind. What is lost is done again; nothing contradicts itself.
"""

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from support.chaos.recount import Recount, recount
from support.chaos.run import FAULTS, ChaosRun, Size, scripted, worker_env, worker_options
from support.chaos.store_losses import StalePromoter, TailCutter
from support.servers.redis_servers import RedisServer, short_folder
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.server import ModelServer
from stepfleet.worker.testing.service import RequestLog

AGENTS = Path(__file__).parent / "agent_modules" / "chaos_agents.py"
MakeRedis = Callable[..., RedisServer]
Lossy = TailCutter | StalePromoter
Play = Callable[[Size, str], tuple[ChaosRun, Recount]]
SMALL = Size(
    runs=30, workers=2, kills=1, stops=0, rolls=0, redis_kills=0, redis_terms=0, wipes=0, losses=4
)
LARGE = {"runs": 1000, "kills": 12, "stops": 2, "rolls": 1, "redis_kills": 0, "redis_terms": 0}

# A busy machine takes several times as long as one that has nothing else to do.
pytestmark = pytest.mark.timeout(420)


def lossy(way: str, server: RedisServer, make: MakeRedis, seed: int) -> Lossy:
    """Return what makes this server lose what it had acknowledged."""
    draw = random.Random(seed)
    return TailCutter(server, draw) if way == "cut" else StalePromoter(server, make, draw)


@pytest.fixture
def play(effects: Path, tmp_path: Path, own_redis: MakeRedis) -> Iterator[Play]:
    """Play a chaos run on a Redis that loses in the way that is named; return its recount."""
    calls = tmp_path / "calls.jsonl"
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(short_folder())
        server = own_redis(appendfsync="everysec", auto_aof_rewrite_percentage="0")

        def played(size: Size, way: str) -> tuple[ChaosRun, Recount]:
            log = RequestLog(keep=0, path=calls)
            rules = scripted(size.latency)
            model = cleanup.enter_context(ModelServer(rules, faults=FAULTS, log=log))
            loses = lossy(way, server, own_redis, size.seed)

            def launch(name: str) -> FleetWorker:
                worker = FleetWorker(
                    folder,
                    server.url,
                    model.url,
                    name=name,
                    options=worker_options(name, processes=False),
                    env=worker_env(name, AGENTS, effects),
                )
                cleanup.callback(worker.end)
                return worker.launch()

            began = time.monotonic()
            run = ChaosRun(size, server, launch, loses.strike)
            run.play(list(load_agents(str(AGENTS)).values()))
            with redis.Redis.from_url(server.url, decode_responses=True) as client:
                counted = recount(client, calls, effects, run.keys, lossy=True)
            counted.violations += [f"the model refused: {one}" for one in model.violations]
            sys.stdout.write(told(run, counted, loses, time.monotonic() - began))
            assert any(loses.lost_bytes)
            return run, counted

        yield played


def told(run: ChaosRun, counted: Recount, loses: Lossy, seconds: float) -> str:
    """Return what the run came to, for people."""
    lines = [
        f"{counted.runs} runs, {counted.steps} steps in {seconds:.0f} s: {dict(counted.statuses)}",
        f"events {dict(run.happened)}, bytes that each loss took {loses.lost_bytes}",
        f"model requests {counted.requests}, paid again {counted.repeated}",
        f"of these unlisted {counted.unlisted}; effects {counted.effects}, redone {counted.redone}",
        f"ledger {dict(counted.ledger)}, violations {len(counted.violations)}",
        *counted.violations[:50],
    ]
    return "\n".join(["", *lines, ""])


def check(run: ChaosRun, counted: Recount) -> None:
    """Assert that all ended and that the records agree with each other."""
    assert not counted.violations, counted.violations[:20]
    assert set(counted.statuses) <= {"completed", "cancelled"}
    assert counted.runs == len(run.keys) == run.size.runs
    assert run.happened["loss"] == run.size.losses
    assert run.exit_codes == [0] * run.size.workers


@pytest.mark.parametrize("way", ["cut", pytest.param("promote", marks=pytest.mark.long)])
def test_what_the_store_loses_is_done_again(play: Play, way: str) -> None:
    """DIST-12: a second of commits is lost, now and again; all runs end and all records agree."""
    check(*play(SMALL, way))


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", ["cut", "promote"])
def test_what_the_store_loses_is_done_again_at_length(play: Play, way: str) -> None:
    """DIST-12: the same for long; the size comes from the environment."""
    check(*play(Size.from_environment(**LARGE, wipes=2, losses=30, pace=2.5), way))
