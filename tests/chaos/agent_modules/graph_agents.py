"""An agent of graphs over results, and one that hands its runs over."""

from stepfleet.orchestrator import Agent
from stepfleet.worker.runtime import background

setattr(background, "SCHEDULE_SECONDS", 0.5)  # noqa: B010 - the tests have no time to wait for it
PRICES = {"input": 1.0, "output": 2.0}  # USD a million tokens

node = Agent("node", model="openai:graph", pricing=PRICES, time_limit=None)
back = Agent("back", model="openai:graph", pricing=PRICES, time_limit=None)
front = Agent("front", model="openai:graph", pricing=PRICES, handoffs=[back], time_limit=None)
