"""Agents of the response cache's tests."""

from stepfleet.orchestrator import Agent, CachePolicy, tool


@tool(read_only=True)
def look(what: str) -> str:
    """Look something up."""
    return f"seen {what}"


MODEL = "openai:gpt-4o-mini"
plain = Agent("plain", model=MODEL, tools=[look])
keen = Agent("keen", model=MODEL, tools=[look], cache=CachePolicy(ttl=600))
brief = Agent("brief", model=MODEL, tools=[look], cache=CachePolicy(ttl=1))
