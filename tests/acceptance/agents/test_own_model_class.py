from collections.abc import Callable
from pathlib import Path

from support.deadlines import wait_until
from support.workers.fleet_workers import FleetWorker
from support.workers.known_agents import until_known

from stepfleet.orchestrator import Fleet

LONG = 60.0
OWN_MODEL = Path(__file__).parents[1] / "agent_modules" / "own_model.py"


def test_a_model_class_of_ones_own_runs_on_the_fleet(
    start_worker: Callable[..., FleetWorker], redis_url: str
) -> None:
    """LLM-01, LLM-12, MSG-07: by the agent's name; the client has none of its code."""
    for name in ("one", "two"):
        start_worker(name=name, env={"STEPFLEET_AGENTS": str(OWN_MODEL), "STEPFLEET_SLOTS": "1"})
    until_known(redis_url, "echo")
    workers: set[str | None] = set()
    with Fleet(redis_url) as fleet:

        def both_have_worked() -> bool:
            batch = fleet.submit_batch([{"input": f"hello {n}"} for n in range(20)], agent="echo")
            for n, result in enumerate(batch.results(ordered=True)):
                (step,) = result.steps
                assert result.output == f"echo of hello {n}"
                assert (step.model, step.usage_reported) == ("echo", False)
                workers.add(step.worker)
            return len(workers) == 2

        wait_until(both_have_worked, within=LONG, what="steps of both workers")
