"""An agent with a tool that cannot be broken off: it holds up the event loop itself."""

import os
import threading
from pathlib import Path

from stepfleet.orchestrator import Agent, tool


@tool(thread=False, timeout=600)
def cling(what: str) -> str:
    """Hold up everything in this process."""
    Path(os.environ["EFFECTS"]).write_text(f"cling to {what}\n", encoding="utf-8")
    threading.Event().wait(600)
    return what


stubborn = Agent("stubborn", model="openai:scripted", tools=[cling])


@tool(thread=False, read_only=True, timeout=600)
def cling_again(what: str) -> str:
    """Hold up everything, each time; it may be repeated."""
    with Path(os.environ["EFFECTS"]).open("a", encoding="utf-8") as file:
        file.write("again\n")
    threading.Event().wait(600)
    return what


stuck = Agent("stuck", model="openai:scripted", tools=[cling_again])
