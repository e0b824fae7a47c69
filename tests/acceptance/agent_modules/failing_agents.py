"""An agent whose tools fail below their first line."""

import asyncio

from stepfleet.orchestrator import Agent, ErrorPolicy, tool


def look_up(what: str) -> str:
    """Fail as an index without that entry does."""
    raise LookupError(f"no {what} in the index")


@tool(read_only=True)
def on_a_thread(what: str) -> str:
    """Fail in a thread."""
    return look_up(what)


@tool(read_only=True)
async def in_the_loop(what: str) -> str:
    """Fail on the event loop."""
    await asyncio.sleep(0)
    return look_up(what)


@tool(read_only=True, queue="heavy")
def on_its_queue(what: str) -> str:
    """Fail in a task of its own."""
    return look_up(what)


broken = Agent(
    "broken",
    model="openai:scripted",
    tools=[on_a_thread, in_the_loop, on_its_queue],
    error_policy=ErrorPolicy.ignore_tool_errors(),
)
