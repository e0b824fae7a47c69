"""An agent two of whose tools end their process: in a step, and on a queue of tools."""

import os
import signal
import threading
from pathlib import Path

from stepfleet.orchestrator import Agent, MemoryPolicy, tool


@tool(read_only=True, thread=False)
def look(what: str) -> str:
    """Look something up."""
    return f"seen {what}"


@tool(read_only=True, thread=False)
def die(what: str) -> str:
    """End this process, as a fault in native code does."""
    return end(what)


@tool(queue="gpu", read_only=True, thread=False)
def burst(what: str) -> str:
    """End the process of the tools' queue."""
    return end(what)


@tool(queue="gpu", read_only=True)
def weigh(what: str) -> str:
    """Take a moment on the tools' queue."""
    threading.Event().wait(0.5)
    return f"weighed {what}"


def end(what: str) -> str:
    """Note it, print more than a pipe holds, and kill this process."""
    with Path(os.environ["EFFECTS"]).open("a", encoding="utf-8") as file:
        file.write(f"{what}\n")
    print("x" * 200_000, flush=True)  # noqa: T201 - as said
    os.kill(os.getpid(), signal.SIGKILL)
    return "never said"


handy = Agent(
    "handy",
    model="openai:gpt-4o-mini",
    instructions="Be brief.",
    tools=[look, die, burst, weigh],
    max_steps=9,
)
frail = Agent(
    "frail",
    model="openai:gpt-4o-mini",
    instructions="Be brief.",
    memory=MemoryPolicy(custom="frail_memory:recall"),
)
