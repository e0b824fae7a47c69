"""The agent of `upgrade.py`: a file that the version before loads as well."""

import os
from pathlib import Path

from stepfleet import Agent, ErrorPolicy, tool
from stepfleet.orchestrator.tools.invocation import current_invocation


@tool
def look(step: int) -> int:
    """Write the call's key into the file `EFFECTS`: a line per effect."""
    with Path(os.environ["EFFECTS"]).open("ab", buffering=0) as file:
        file.write(f"{current_invocation().idempotency_key}\n".encode())
    return step


mover = Agent(
    "mover",
    model="openai:benchmark",
    tools=[look],
    max_steps=1000,
    token_limit=None,
    time_limit=None,
    error_policy=ErrorPolicy.retry_tool_errors(3),  # a call that a killed worker had begun
)
