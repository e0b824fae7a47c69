"""An agent of a worker that looks after batches only when it is told to."""

from stepfleet.orchestrator import Agent
from stepfleet.worker.runtime import background

for _name in ("LOOK_SECONDS", "FOLLOW_SECONDS"):
    setattr(background, _name, 3600.0)

plain = Agent("plain", model="openai:scripted")
