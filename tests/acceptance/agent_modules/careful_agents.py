"""An agent whose refunds need a person, and which asks people. `EFFECTS` names a file."""

import os
from pathlib import Path

from stepfleet.orchestrator import Agent, ask_person, current_invocation, tool
from stepfleet.orchestrator.tools import ToolInvocation


def is_large(invocation: ToolInvocation) -> bool:
    """Say whether a refund needs an approval."""
    return float(invocation.arguments["usd"]) >= 100


@tool(approval=is_large)
def refund(customer: str, usd: float) -> str:
    """Pay money back."""
    with Path(os.environ["EFFECTS"]).open("a", encoding="utf-8") as file:
        file.write(f"{current_invocation().run_id} {customer} {usd:g}\n")
    return f"paid {usd:g} to {customer}"


@tool(approval=True, approval_timeout=1.0)
def delete(what: str) -> str:
    """Remove something."""
    raise AssertionError(what)


clerk = Agent(
    "clerk",
    model="openai:scripted",
    tools=[refund, delete, ask_person],
    parallel_tool_execution=True,
    time_limit=None,
)
