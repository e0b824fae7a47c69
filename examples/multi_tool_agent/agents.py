"""An agent with three tools, of which it calls two at once where neither needs the other."""

from stepfleet import Agent, ErrorPolicy, calculator, tool

KILOMETRES = {("Oslo", "Bergen"): 463, ("Oslo", "Trondheim"): 495, ("Bergen", "Voss"): 107}
KRONER_PER_KILOMETRE = {"train": 1.5, "bus": 1.0}


@tool(read_only=True)
def distance(start: str, end: str) -> int:
    """Return how many kilometres it is from one city to another.

    Args:
        start: A city.
        end: Another city.
    """
    try:
        return KILOMETRES[start, end]
    except KeyError:
        raise LookupError(f"no way is known from {start} to {end}") from None


@tool(read_only=True)
def fare(vehicle: str) -> float:
    """Return what a kilometre costs in kroner.

    Args:
        vehicle: `train` or `bus`.
    """
    return KRONER_PER_KILOMETRE[vehicle]


guide = Agent(
    "guide",
    model="openai:gpt-4o-mini",
    instructions=(
        "Say what a journey costs. Ask for distance and fare at once, then multiply them with the "
        "calculator, and answer in one sentence. Where no way is known, say so."
    ),
    tools=[distance, fare, calculator],
    parallel_tool_execution=True,
    max_steps=6,
    error_policy=ErrorPolicy.retry_tool_errors(3),
)
