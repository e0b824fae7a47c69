"""Agents of the acceptance tests. Effects are lines in the file that `EFFECTS` names."""

import os
from pathlib import Path

from stepfleet.orchestrator import Agent, ErrorPolicy, current_invocation, tool


@tool(read_only=True, thread=False)
def look(what: str) -> str:
    """Look something up."""
    return f"seen {what}"


@tool(thread=False)
def effect(what: str) -> str:
    """Have an effect that can be counted."""
    invocation = current_invocation()
    line = f"{invocation.run_id} {invocation.step} {invocation.idempotency_key} {what}\n"
    with Path(os.environ["EFFECTS"]).open("a", encoding="utf-8") as file:
        file.write(line)
    return f"did {what}"


@tool
def broken(what: str) -> str:
    """Fail."""
    message = f"cannot {what}"
    raise ValueError(message)


# A call whose outcome is unknown after a kill is told to the model, and the run goes on.
plain = Agent(
    "plain",
    model="openai:scripted",
    instructions="Be brief.",
    tools=[look, effect],
    error_policy=ErrorPolicy.ignore_tool_errors(),
)
strict = Agent("strict", model="openai:scripted", tools=[look, broken])
patient = Agent(
    "patient",
    model="openai:scripted",
    tools=[look, broken],
    error_policy=ErrorPolicy.retry_tool_errors(3),
)
