"""The agent of `bench.py`, and the rules by which the simulated provider answers its calls.

A run's input is JSON: `seconds` before each answer, `tools` (whether an answer asks for the tool
`work`), and `tool_seconds`. The last answer ends the run.
"""

import asyncio

from stepfleet.orchestrator import Agent, tool
from stepfleet.orchestrator.continuation.drivers import ResponseContentCheck
from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.testing import Reply, RequestRecord, ToolCallReply

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


def rules(request: RequestRecord) -> Reply:
    """Return the planned answer. Raises `ValueError` for an input that is no plan."""
    plan = exact_json.loads(request.question)
    last = len(plan["seconds"]) - 1
    place = min(request.turn - 1, last)
    seconds = float(plan["seconds"][place])
    if place == last:
        return Reply("done", latency=seconds)
    if plan["tools"][place]:
        call = ToolCallReply("work", {"seconds": plan["tool_seconds"]})
        return Reply(tool_calls=(call,), latency=seconds)
    return Reply(MORE, latency=seconds)
