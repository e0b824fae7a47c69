"""Two agents for many reviews: one reads each of them, the other one puts results together."""

from stepfleet import Agent

reader = Agent(
    "reader",
    model="openai:gpt-4o-mini",
    instructions="Say in one word whether the review is positive or negative.",
    max_steps=2,
)

editor = Agent(
    "editor",
    model="openai:gpt-4o-mini",
    instructions="Add up what the results count, and write: N positive, N negative.",
    max_steps=2,
)
