"""Fleets under everything at once: at the end a recount of the raw records finds no fault.

The large run takes its size from `CHAOS_RUNS`, `CHAOS_KILLS`, ... (see `Size`), and prints figures.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest
import redis
from support.chaos.recount import Recount, recount
from support.chaos.run import FAULTS, ChaosRun, Size, scripted, worker_env, worker_options
from support.servers.redis_servers import RedisServer, short_folder
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.worker.testing.server import ModelServer
from stepfleet.worker.testing.service import RequestLog

AGENTS = Path(__file__).parent / "agent_modules" / "chaos_agents.py"
Played = tuple[ChaosRun, Recount, float]
Play = Callable[[Size], Played]

# A busy machine takes several times as long as one that has nothing else to do.
pytestmark = pytest.mark.timeout(420)


@pytest.fixture
def play(effects: Path, tmp_path: Path, own_redis: Callable[..., RedisServer]) -> Iterator[Play]:
    """Play a chaos run of a size; return it with the recount and the seconds that it took."""
    calls = tmp_path / "calls.jsonl"
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(short_folder())
        server = own_redis(appendfsync="always")

        def played(size: Size) -> Played:
            log = RequestLog(keep=0, path=calls)
            rules = scripted(size.latency)
            model = cleanup.enter_context(ModelServer(rules, faults=FAULTS, log=log))

            def launch(name: str) -> FleetWorker:
                worker = FleetWorker(
                    folder,
                    server.url,
                    model.url,
                    name=name,
                    options=worker_options(name),
                    env=worker_env(name, AGENTS, effects),
                )
                cleanup.callback(worker.end)
                return worker.launch()

            began = time.monotonic()
            run = ChaosRun(size, server, launch)
            run.play(list(load_agents(str(AGENTS)).values()))
            seconds = time.monotonic() - began
            with redis.Redis.from_url(server.url, decode_responses=True) as client:
                counted = recount(client, calls, effects, run.keys)
            counted.violations += [f"the model refused: {one}" for one in model.violations]
            sys.stdout.write(figures(run, counted, seconds))
            return run, counted, seconds

        yield played


def figures(run: ChaosRun, counted: Recount, seconds: float) -> str:
    """Return what a chaos run came to, for people."""
    waits = run.watch.waits or [0.0]
    p99 = waits[min(len(waits) - 1, int(len(waits) * 0.99))]
    lines = [
        f"{counted.runs} runs, {counted.steps} steps in {seconds:.0f} s: {dict(counted.statuses)}",
        f"events {dict(run.happened)}, kills with work {run.workers.killed_with_work}",
        f"messages {dict(run.courier.counts)}",
        f"clients {dict(run.clients.counts)}, refused {dict(run.clients.refused)}",
        f"model requests {counted.requests}, paid again {counted.repeated}",
        f"of these after an answer {counted.repeated_answers}",
        f"listed as ambiguous {counted.ambiguous} (about {counted.ambiguous_cost:.6f} USD)",
        f"ledger {dict(counted.ledger)}, effects {counted.effects}, unknown {counted.unknown}",
        f"costs {dict(counted.costs)}",
        f"recovery of {len(waits)} runs: median {median(waits):.2f} s, p99 {p99:.2f} s",
        f"worst recovery {waits[-1]:.2f} s",
        f"violations {len(counted.violations)}",
        *counted.violations[:50],
    ]
    return "\n".join(["", *lines, ""])


def check(run: ChaosRun, counted: Recount) -> None:
    """Assert that the recount found nothing and that the run was one."""
    assert not counted.violations, counted.violations[:20]
    assert set(counted.statuses) <= {"completed", "cancelled"}
    assert counted.runs == len(run.keys) == run.size.runs
    assert run.workers.kills == run.size.kills
    assert run.happened.total() == len(run.size.schedule)
    assert counted.repeated <= counted.ambiguous
    assert run.exit_codes == [0] * run.size.workers


def test_a_fleet_under_everything_at_once_keeps_its_promises(play: Play) -> None:
    """COST-12, DIST-04, DIST-05, DIST-08, DIST-10, DIST-12, TOOL-26: small, in the gate.

    MSG-18: the model refuses a call without its answer. RUN-09, RUN-12, CKPT-14: sums, numbers and
    results of the steps are those of an undisturbed run.
    """
    run, counted, _ = play(Size())
    check(run, counted)


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_a_large_fleet_under_everything_at_once_keeps_its_promises(play: Play) -> None:
    """CKPT-14, MSG-18: the same for long; the size comes from the environment."""
    run, counted, _ = play(
        Size.from_environment(
            runs=1200,
            kills=70,
            stops=16,
            rolls=4,
            redis_kills=8,
            redis_terms=4,
            wipes=8,
            pace=3.5,
            latency=1.2,
        )
    )
    check(run, counted)
