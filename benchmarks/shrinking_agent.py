"""The agents of `shrinking.py`: one works, one waits for a person who never comes."""

import os

from upgrade_agent import look, mover

from stepfleet import Agent, ErrorPolicy, tool

__all__ = ["mover", "waiter"]


@tool(
    name="look",
    approval=True,
    approval_timeout=float(os.environ.get("WAIT_SECONDS", "30")),
    approval_default="approve",
)
def look_when_approved(step: int) -> int:
    """Do as `look` does."""
    return int(look(step))


waiter = Agent(
    "waiter",
    model="openai:benchmark",
    tools=[look_when_approved],
    token_limit=None,
    time_limit=None,
    error_policy=ErrorPolicy.retry_tool_errors(3),
)
