"""What each conversation of a chaos run is to do: drawn from its key alone.

Shared by the scripted model and by the checker; knows neither the product nor Redis.
"""

import random
from dataclasses import dataclass
from functools import cache

Call = tuple[str, str]
SHORT = "short"


@dataclass(frozen=True)
class Plan:
    """The tool calls of each turn (from 1), as (tool, what); the turn behind them answers."""

    key: str
    turns: tuple[tuple[Call, ...], ...]
    seconds: tuple[float, ...]

    @property
    def steps(self) -> int:
        return len(self.turns) + 1

    @property
    def answer(self) -> str:
        return f"answer to {self.key}"


@cache
def plan_of(key: str) -> Plan:
    """Return the plan of a conversation: 3 to 10 steps, up to 3 tools in each but the last.

    One whose key begins with `SHORT` looks once and answers.
    """
    draw = random.Random(key)
    if key.startswith(SHORT):
        return Plan(key, ((("look", f"{key}/1/0"),),), (draw.random(), draw.random()))
    turns = tuple(
        tuple(
            (draw.choice(("effect", "effect", "look", "render")), f"{key}/{turn}/{index}")
            for index in range(draw.randint(1, 3))
        )
        for turn in range(1, draw.randint(3, 10))
    )
    return Plan(key, turns, tuple(draw.random() for _ in range(len(turns) + 1)))
