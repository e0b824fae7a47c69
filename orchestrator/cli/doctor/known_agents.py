"""The agents that workers have announced to a store."""

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.opening.opening import OpenStore


async def known_agents(opened: OpenStore) -> list[AgentConfig]:
    """Return their configurations, by name."""
    named = await opened.connection.execute("HGETALL", keys.NAMES)
    return [await opened.configs.load(named[name]) for name in sorted(named)]
