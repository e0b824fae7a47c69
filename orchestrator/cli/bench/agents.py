"""The agent that `stepfleet bench` runs; its workers load it from here by name."""

import asyncio

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.continuation.drivers import ResponseContentCheck
from stepfleet.orchestrator.tools import tool

MORE = "more"
"""The model's answer for a further step without a tool."""


@tool(read_only=True)
async def work(seconds: float) -> str:
    """Sleep for so many seconds."""
    if seconds:
        await asyncio.sleep(seconds)
    return "worked"


def goes_on(text: str) -> bool:
    """Return whether an answer announces a further step."""
    return text == MORE


bench = Agent(
    "bench",
    model="openai:bench",
    instructions="Work step by step.",
    tools=[work],
    criteria=[ResponseContentCheck(goes_on)],
    max_steps=100_000,
    token_limit=None,
    time_limit=None,
)
