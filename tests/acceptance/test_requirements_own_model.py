from collections.abc import Callable
from pathlib import Path

from fleet_workers import FleetWorker
from known_agents import until_known

from stepfleet.orchestrator import Fleet

LONG = 60.0
OWN_MODEL = Path(__file__).parent / "agents" / "own_model.py"


def test_a_model_class_of_ones_own_runs_on_the_fleet(
    start_worker: Callable[..., FleetWorker], redis_url: str
) -> None:
    """LLM-01, LLM-12, MSG-07: by the agent's name; the client has none of its code."""
    start_worker(env={"STEPFLEET_AGENTS": str(OWN_MODEL)})
    until_known(redis_url, "echo")
    with Fleet(redis_url) as fleet:
        result = fleet.run_with_steps("echo", "hello", timeout=LONG)
    assert result.output == "echo of hello"
    assert (result.steps[0].model, result.steps[0].usage_reported) == ("echo", False)
