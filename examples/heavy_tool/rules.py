"""A simulated model that has prime numbers counted."""

import re

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply


def rules(request: RequestRecord) -> Reply:
    """Ask the tool, then say what it said."""
    below = int("".join(re.findall(r"\d+", request.question)) or 10)
    if not request.answers:
        return Reply(tool_calls=(ToolCallReply("count_primes", {"below": below}),))
    return Reply(f"There are {request.answers[-1].content} prime numbers below {below}.")
