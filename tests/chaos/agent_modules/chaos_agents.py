"""Agents of the chaos tests. Effects are lines in the file that `EFFECTS` names."""

import asyncio
import os
from pathlib import Path

from stepfleet.orchestrator import Agent, ErrorPolicy, current_invocation, tool

TOOL_SECONDS = 0.1
DIES_IN_A_TOOL = ("during-tool:", "during-call-task:")


@tool(read_only=True, thread=False)
def look(what: str) -> str:
    """Look something up."""
    return f"seen {what}"


@tool
async def effect(what: str) -> str:
    """Have an effect that can be counted, and take a while to say so."""
    _note(what)
    await _take_a_while()
    return f"did {what}"


@tool(queue="heavy")
async def render(what: str) -> str:
    """Have an effect on a queue of its own."""
    _note(what)
    await _take_a_while()
    return f"rendered {what}"


def _note(what: str) -> None:
    invocation = current_invocation()
    line = f"{invocation.run_id} {invocation.step} {invocation.idempotency_key} {what}\n"
    with Path(os.environ["EFFECTS"]).open("a", encoding="utf-8") as file:
        file.write(line)


async def _take_a_while() -> None:
    """Sleep; where this process is to end in the midst of a tool, not before that has begun."""
    if os.environ.get("STEPFLEET_CRASH_AT", "").startswith(DIES_IN_A_TOOL):
        ends = Path(os.environ["STEPFLEET_CRASH_ONCE"])
        while not ends.exists():  # noqa: ASYNC110 - it is made by whoever ends this process
            await asyncio.sleep(0.01)  # polls: the tool's time limit ends this
    await asyncio.sleep(TOOL_SECONDS)  # a kill hits the middle of a tool


# A call whose outcome is unknown after a kill is told to the model, and the run goes on.
plain = Agent(
    "plain",
    model="openai:gpt-4o-mini",
    instructions="Be brief.",
    tools=[look, effect, render],
    max_steps=20,
    token_limit=None,
    error_policy=ErrorPolicy.ignore_tool_errors(),
)
swift = Agent(
    "swift",
    model="openai:gpt-4o-mini",
    instructions="Be brief.",
    tools=[look, effect, render],
    max_steps=20,
    token_limit=None,
    parallel_tool_execution=True,
    error_policy=ErrorPolicy.ignore_tool_errors(),
)
