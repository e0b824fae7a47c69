"""A simulated model that refunds what the question says."""

import re

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply


def rules(request: RequestRecord) -> Reply:
    """Call the tool, then say what came of it."""
    who, euros = re.findall(r"(\w+) wants (\d+)", request.question)[0]
    if not request.answers:
        return Reply(tool_calls=(ToolCallReply("refund", {"customer": who, "euros": int(euros)}),))
    answer = request.answers[-1].content
    return Reply("A colleague has to look at that." if "denied" in answer else f"Done: {answer}.")
