"""An agent one of whose tools ends the process that runs it."""

import os
import signal
from pathlib import Path

from stepfleet.orchestrator import Agent, tool


@tool(read_only=True, thread=False)
def look(what: str) -> str:
    """Look something up."""
    return f"seen {what}"


@tool(read_only=True, thread=False)
def die(what: str) -> str:
    """End this process, as a fault in native code does."""
    with Path(os.environ["EFFECTS"]).open("a", encoding="utf-8") as file:
        file.write(f"{what}\n")
    print("x" * 200_000, flush=True)  # noqa: T201 - more than a pipe holds
    os.kill(os.getpid(), signal.SIGKILL)
    return "never said"


handy = Agent(
    "handy", model="openai:gpt-4o-mini", instructions="Be brief.", tools=[look, die], max_steps=9
)
