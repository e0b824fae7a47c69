"""Inspect: an evaluation whose samples are the runs; its adaptive connections find the limit.

Samples are as many at a time as there are, so that the connections alone decide how many calls
there are at once. Their bounds are Inspect's own, but for the highest number, which its own would
keep below the limit of a service that answers slowly.
"""

import json
import sys

from inspect_ai import Task, eval  # noqa: A004 - Inspect's name
from inspect_ai.dataset import Sample
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool
from inspect_ai.util import AdaptiveConcurrency

MOST_CONNECTIONS = 1000


@tool
def look() -> Tool:
    """Return the tool that gives its number back."""

    async def execute(step: int) -> int:
        """Return the number it is given.

        Args:
            step: a number
        """
        return step

    return execute


def main() -> None:
    """Do the job of the command line."""
    job = json.loads(sys.argv[1])
    samples = [
        Sample(input=f"{job['turns']} turns, run {number}", target="done")
        for number in range(job["runs"])
    ]
    [log] = eval(
        Task(dataset=samples, solver=[use_tools(look()), generate()]),
        model="openai/benchmark",
        model_base_url=job["model"],
        adaptive_connections=AdaptiveConcurrency(max=MOST_CONNECTIONS),
        max_samples=job["runs"],
        log_dir=job["folder"],
        display="none",
    )
    if log.status != "success":
        sys.exit(f"the evaluation ended as {log.status}: {log.error}")


if __name__ == "__main__":
    main()
