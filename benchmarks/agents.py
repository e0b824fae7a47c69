"""The agent of the benchmarks: `STEPS` model calls, a tool that costs nothing between them."""

from stepfleet.orchestrator import Agent, tool


@tool(read_only=True, thread=False)
def look(step: int) -> int:
    """Return the number it is given."""
    return step


runner = Agent("runner", model="openai:benchmark", tools=[look], max_steps=1000, token_limit=None)
