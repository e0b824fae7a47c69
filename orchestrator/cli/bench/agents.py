"""The agent that `stepfleet bench` runs; its workers load it from here by name."""

import asyncio

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.continuation.drivers import ResponseContentCheck
from stepfleet.orchestrator.tools import tool

MORE = "more"
"""What the model says where it goes on without a tool."""


@tool(read_only=True)
async def work(seconds: float) -> str:
    """Take so many seconds, without a CPU's help."""
    if seconds:
        await asyncio.sleep(seconds)
    return "worked"


def goes_on(text: str) -> bool:
    """Tell whether an answer announces a further step."""
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
