"""Agents whose work is traced: a light tool, one with a queue of its own, one that fails."""

import os
import time
from pathlib import Path

from opentelemetry import trace

from stepfleet.orchestrator import Agent, ErrorPolicy, tool


@tool(read_only=True)
def stock(product: str) -> int:
    """Return how many pieces are there; tells a span of its own."""
    with trace.get_tracer("warehouse").start_as_current_span("shelf"):
        return len(product)


@tool(queue="gpu", timeout=60)
def render(product: str) -> str:
    """Draw it, once it is allowed."""
    while not Path(os.environ["ALLOWED"]).exists():
        time.sleep(0.02)  # polls: another process makes it; the tool's time limit ends this
    return f"a picture of {product}"


@tool(read_only=True)
def broken(product: str) -> str:
    """Fail."""
    raise RuntimeError(f"no {product} here, by my secret canary-7")


clerk = Agent(
    "clerk",
    model="openai:scripted",
    tools=[stock, broken],
    error_policy=ErrorPolicy.ignore_tool_errors(),
)
painter = Agent("painter", model="openai:scripted", tools=[render])
leader = Agent("leader", model="openai:scripted", agents=[clerk])
