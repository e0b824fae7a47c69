"""The agents of the benchmarks: `STEPS` model calls, a tool that costs nothing between them."""

import os
import random
import time
from pathlib import Path

from stepfleet import Agent, tool

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


@tool(name="look", read_only=True, thread=False)
def look_and_block(step: int) -> int:
    """Hold up its process's event loop for `BLOCK_SECONDS`: the first call of all, alone."""
    try:
        Path(os.environ["BLOCK_ONCE"]).touch(exist_ok=False)
    except FileExistsError:
        return step
    time.sleep(float(os.environ["BLOCK_SECONDS"]))
    return step


@tool(name="look", approval=True)
def look_when_approved(step: int) -> int:
    """Add a byte to the file `EFFECTS`, for each call that is made."""
    with Path(os.environ["EFFECTS"]).open("ab", buffering=0) as file:
        file.write(b".")
    return step


runner = Agent("runner", model="openai:benchmark", tools=[look], max_steps=1000, token_limit=None)
silent = Agent(  # the service sends no headers about limits
    "silent", model="google:benchmark", tools=[look], max_steps=1000, token_limit=None
)
reader = Agent(
    "reader", model="openai:benchmark", tools=[look_up], max_steps=1000, token_limit=None
)
blocker = Agent(
    "blocker", model="openai:benchmark", tools=[look_and_block], max_steps=1000, token_limit=None
)
asker = Agent("asker", model="openai:benchmark", tools=[look_when_approved], time_limit=None)
