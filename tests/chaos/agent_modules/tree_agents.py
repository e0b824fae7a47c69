"""A root that has branches work for it, and they leaves."""

from stepfleet.orchestrator import Agent

PRICES = {"input": 1.0, "output": 2.0}  # USD a million tokens

leaf = Agent("leaf", model="openai:tree", pricing=PRICES, time_limit=None)
branch = Agent(
    "branch",
    model="openai:tree",
    pricing=PRICES,
    agents=[leaf],
    parallel_tool_execution=True,
    time_limit=None,
    token_limit=None,
)
root = Agent(
    "root",
    model="openai:tree",
    pricing=PRICES,
    agents=[branch],
    parallel_tool_execution=True,
    time_limit=None,
    token_limit=None,
)
