"""Agents that work for each other, hand over, and ask people. `EFFECTS` names a file."""

import os
from pathlib import Path

from stepfleet.orchestrator import Agent, ask_person, current_invocation, tool


@tool(approval=True)
def refund(customer: str) -> str:
    """Pay money back."""
    with Path(os.environ["EFFECTS"]).open("a", encoding="utf-8") as file:
        file.write(f"{current_invocation().run_id} {customer}\n")
    return f"paid {customer}"


checker = Agent("checker", model="openai:scripted", time_limit=None)
scout = Agent("scout", model="openai:scripted", agents=[checker], time_limit=None)
clerk = Agent(
    "clerk",
    model="openai:scripted",
    tools=[refund, ask_person],
    parallel_tool_execution=True,
    time_limit=None,
)
lead = Agent(
    "lead",
    model="openai:scripted",
    agents=[scout, clerk],
    parallel_tool_execution=True,
    time_limit=None,
)
desk = Agent("desk", model="openai:scripted", instructions="You are the desk.", time_limit=None)
reception = Agent("reception", model="openai:scripted", handoffs=[desk], time_limit=None)
