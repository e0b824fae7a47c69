"""The agents of the benchmarks: `STEPS` model calls, a tool that costs nothing between them."""

import random

from stepfleet.orchestrator import Agent, tool

PAGE_CHARACTERS = 8000
_LETTERS = "etaoinshrdlucmfwypvbgk"


@tool(read_only=True, thread=False)
def look(step: int) -> int:
    """Return the number it is given."""
    return step


@tool(name="look", read_only=True, thread=False)
def look_up(step: int) -> str:
    """Return a page of text: words of its own for each number, some of them often."""
    choice = random.Random(step)  # noqa: S311 - text, not a secret
    known = ["".join(choice.choices(_LETTERS, k=choice.randint(2, 9))) for _ in range(600)]
    words = choice.choices(known, weights=[1 / (n + 1) for n in range(600)], k=PAGE_CHARACTERS)
    return " ".join(words)[:PAGE_CHARACTERS]


runner = Agent("runner", model="openai:benchmark", tools=[look], max_steps=1000, token_limit=None)
reader = Agent(
    "reader", model="openai:benchmark", tools=[look_up], max_steps=1000, token_limit=None
)
