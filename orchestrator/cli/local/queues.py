"""Which queues a local worker serves: the steps' own, and those of its agents' tools. Pure."""

from collections.abc import Iterable

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.errors import ConfigurationError


def tool_queues(agents: Iterable[Agent]) -> tuple[str, ...]:
    """Return the queues of the agents' tools, sorted."""
    return tuple(sorted({queue for agent in agents for queue in agent.queues}))


def asked_queues(given: Iterable[str]) -> tuple[str, ...]:
    """Return the queues that `--queue` names: one each, or several with commas between.

    Raises `ConfigurationError` for an empty name.
    """
    names = [name.strip() for one in given for name in one.split(",")]
    if not all(names):
        raise ConfigurationError("--queue is empty: name a queue, as in --queue gpu")
    return tuple(dict.fromkeys(names))
