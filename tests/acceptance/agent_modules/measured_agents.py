"""Agents whose runs move every metric: tools that work and fail, a cache, a limit, a failed run."""

from stepfleet.orchestrator import Agent, ErrorPolicy, tool


@tool(read_only=True)
def stock(product: str) -> int:
    """Return how many pieces are there."""
    return len(product)


@tool(read_only=True)
def broken(product: str) -> str:
    """Fail."""
    raise RuntimeError(f"no {product} here")


MODEL = "openai:scripted"
careful = Agent(
    "careful",
    model=MODEL,
    tools=[stock, broken],
    error_policy=ErrorPolicy.ignore_tool_errors(),
)
cached = Agent("cached", model=MODEL, cache=True)
strict = Agent("strict", model=MODEL)
