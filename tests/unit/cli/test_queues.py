"""Which queues a worker serves, as `--queue` and agents' tools name them."""

import pytest

from stepfleet.orchestrator import Agent, ConfigurationError, tool
from stepfleet.orchestrator.cli.workers import (
    WorkerOptions,
    celery_arguments,
    named_queues,
    tool_queues,
)


@tool(queue="gpu")
def render() -> str:
    """Render."""
    return ""


def test_local_workers_serve_the_queues_of_their_agents_tools() -> None:
    """DIST-15"""
    agents = [Agent("a", model="openai:x", tools=[render]), Agent("b", model="openai:x")]
    assert tool_queues(agents) == ("gpu",)
    assert tool_queues(agents[1:]) == ()


def test_queues_are_named_one_by_one_or_with_commas() -> None:
    assert named_queues(["gpu, cpu", "gpu"]) == ("gpu", "cpu")
    with pytest.raises(ConfigurationError, match="--queue"):
        named_queues(["gpu,"])


def test_a_worker_of_a_queue_is_shown_as_such() -> None:
    arguments = celery_arguments(WorkerOptions("agents.py", queues=("gpu", "cpu")))
    assert arguments[arguments.index("--queues") + 1] == "gpu,cpu"
    assert "--queues" not in celery_arguments(WorkerOptions("agents.py"))
