"""A simulated model that writes numbers as words at first, and mends that when it is told."""

import re

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply

_ORDER = re.compile(r"(\w+) (\w+?)s?, please\.")
_NUMBERS = {"one": 1, "two": 2, "three": 3, "twelve": 12}


def rules(request: RequestRecord) -> Reply:
    """Answer by the tool that the contract offers."""
    asked = _ORDER.search(request.question)
    if asked is None:
        return Reply("I only read orders like those of questions.jsonl.")
    number, product = asked[1].lower(), asked[2]
    was_told = any(one.name == "structured_response" for one in request.answers)
    pieces = _NUMBERS[number] if was_told else number
    data = {"product": product, "pieces": pieces}
    return Reply(tool_calls=(ToolCallReply("structured_response", {"structured": data}),))
