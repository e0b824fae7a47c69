"""An agent whose tool writes to the log."""

import logging

from stepfleet.orchestrator import Agent, tool

log = logging.getLogger("warehouse")


@tool(read_only=True)
def stock(product: str) -> int:
    """Return how many pieces are there."""
    log.info("looking for %s", product)
    return 3


clerk = Agent("clerk", model="openai:scripted", tools=[stock])
