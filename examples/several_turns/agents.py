"""An agent to talk with: each further message is a turn on the same run, with all that was said."""

from stepfleet import Agent

shopper = Agent(
    "shopper",
    model="openai:gpt-4o-mini",
    instructions="Keep the user's shopping list. Answer with the whole list, and nothing else.",
    max_steps=3,
)
