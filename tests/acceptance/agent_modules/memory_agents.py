"""Agents of the memory tests."""

import os

from stepfleet.orchestrator import Agent, MemoryPolicy, tool
from stepfleet.orchestrator.agents.recall import KeywordMemory, RedisNotes

LOCAL = "redis://127.0.0.1:6379/0"  # where only the agents are read


@tool(read_only=True)
def look(what: str) -> str:
    """Look something up."""
    return f"seen {what}"


summing = Agent(
    "summing",
    model="openai:gpt-4o-mini",
    instructions="Be brief.",
    tools=[look],
    max_steps=30,
    memory=MemoryPolicy(summarize_after=4, summary_model="openai:gpt-4.1-nano"),
)
choosy = Agent(
    "choosy",
    model="openai:gpt-4o-mini",
    instructions="Be brief.",
    tools=[look],
    max_steps=30,
    memory=MemoryPolicy(custom="memory_rules:last_exchange"),
)
noted = Agent(
    "noted",
    model="openai:gpt-4o-mini",
    instructions="Be brief.",
    tools=[look],
    context=KeywordMemory(RedisNotes(os.environ.get("STEPFLEET_REDIS_URL", LOCAL), "acceptance")),
)
