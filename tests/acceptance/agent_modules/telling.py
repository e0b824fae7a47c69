"""Agents that tell: their text while it is written, and callbacks that leave lines in a file."""

import os
import time
from pathlib import Path
from typing import Any

from stepfleet.orchestrator import Agent, Subscribers, tool
from stepfleet.orchestrator.events.subscribers import Moment


@tool(read_only=True, thread=False)
def look(what: str) -> str:
    """Look something up."""
    return f"seen {what}"


@tool(read_only=True, timeout=60)
def search(what: str) -> str:
    """Search until somebody has put the file `GO` there."""
    while not Path(os.environ["GO"]).exists():
        time.sleep(0.05)  # polls: another process makes it; the tool's time limit ends this
    return f"found {what}"


def noting(name: str) -> Any:
    """Return a callback that writes its name and step."""

    def note(moment: Moment, value: Any) -> None:
        with Path(os.environ["NOTES"]).open("a", encoding="utf-8") as file:
            file.write(f"{name} {moment.step} {type(value).__name__} {time.strftime('%z')}\n")

    return note


typist = Agent("typist", model="openai:scripted", broadcast="standard")
looker = Agent(
    "looker", model="openai:scripted", tools=[look], pricing={"input": 1000, "output": 2000}
)
searcher = Agent("searcher", model="openai:scripted", tools=[search], broadcast="standard")
noted = Agent(
    "noted",
    model="openai:scripted",
    tools=[look],
    subscribers=Subscribers(
        step_start=noting("step_start"),
        llm_response=noting("llm_response"),
        step_end=noting("step_end"),
        agent_finish=noting("agent_finish"),
    ),
)
