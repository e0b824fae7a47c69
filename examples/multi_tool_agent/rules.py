"""A simulated model that works out what a journey costs with the agent's tools."""

import re

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply

_QUESTION = re.compile(r"What does the (\w+) from (\w+) to (\w+) cost\?")


def rules(request: RequestRecord) -> Reply:
    """Ask for distance and fare, then for their product, then answer."""
    asked = _QUESTION.fullmatch(request.question)
    if asked is None:
        return Reply("I only know journeys like those of questions.jsonl.")
    vehicle, start, end = asked.groups()
    known = {one.name: one.content for one in request.answers}
    if "distance" not in known:
        wanted = (("distance", {"start": start, "end": end}), ("fare", {"vehicle": vehicle}))
        return Reply(tool_calls=tuple(ToolCallReply(*one) for one in wanted))
    if known["distance"].startswith("Error"):
        return Reply(f"I know no way from {start} to {end}.")
    if "calculator" not in known:
        product = {"expression": f"{known['distance']} * {known['fare']}"}
        return Reply(tool_calls=(ToolCallReply("calculator", product),))
    return Reply(f"The {vehicle} from {start} to {end} costs {known['calculator']} kroner.")
