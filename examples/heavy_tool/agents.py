"""An agent with a tool that takes a processor: each call is a task of its own on the queue `cpu`.

While the tool is at work the run waits without a slot. Give that queue workers of its own, on the
machines that fit; `stepfleet run` serves it too.
"""

from stepfleet import Agent, tool


@tool(queue="cpu", read_only=True, timeout=600)
def count_primes(below: int) -> int:
    """Return how many prime numbers there are below a number.

    Args:
        below: A whole number.
    """
    sieve = bytearray([1]) * below
    sieve[:2] = bytes(2)
    for number in range(2, int(below**0.5) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(range(number * number, below, number)))
    return sum(sieve)


mathematician = Agent(
    "mathematician",
    model="openai:gpt-4o-mini",
    instructions="Count prime numbers with count_primes, and answer in one sentence.",
    tools=[count_primes],
    time_limit=3600,
)
