"""Agents whose tools have queues of their own. Effects are lines in the file `EFFECTS` names."""

import asyncio
import os
import threading
import time
from pathlib import Path

from stepfleet.orchestrator import Agent, ErrorPolicy, current_invocation, tool


def note(word: str) -> None:
    """Write down who did what."""
    line = f"{word} {current_invocation().run_id} {os.getpid()} {time.time()}\n"
    with Path(os.environ["EFFECTS"]).open("a", encoding="utf-8") as file:
        file.write(line)


@tool(queue="gpu", timeout=60)
def render(what: str) -> str:
    """Keep a thread busy for a while, and until the file that `RENDER_UNTIL` names is there."""
    note("render")
    threading.Event().wait(float(os.environ.get("RENDER_SECONDS", "0.1")))
    while "RENDER_UNTIL" in os.environ and not Path(os.environ["RENDER_UNTIL"]).exists():
        time.sleep(0.02)  # polls: another process makes it; the tool's time limit ends this
    return f"rendered {what}"


@tool(queue="gpu", timeout=60)
async def endless(what: str) -> str:
    """Run until somebody says that it is enough."""
    note("endless")
    try:
        await asyncio.Event().wait()
    finally:
        note("told")
    return what


@tool(queue="gpu", read_only=True, timeout=60)
def measure(what: str) -> str:
    """Tell the process that ran it."""
    note("measure")
    threading.Event().wait(float(os.environ.get("RENDER_SECONDS", "0.1")))
    return f"measured {what}"


@tool(read_only=True, thread=False)
def look(what: str) -> str:
    """Look something up, in the step."""
    return f"seen {what}"


heavy = Agent(
    "heavy",
    model="openai:scripted",
    tools=[render, endless, measure, look],
    parallel_tool_execution=True,
    time_limit=None,
    error_policy=ErrorPolicy.ignore_tool_errors(),
)
