"""A simulated model that keeps a shopping list: all that it knows is the conversation."""

import re

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply


def rules(request: RequestRecord) -> Reply:
    """Answer with everything that was ever asked for, less what was taken back."""
    wanted: list[str] = []
    for message in request.messages:
        if message["role"] != "user":
            continue
        for verb, things in re.findall(r"(Add|Drop) ([\w ,]+)\.", message["content"]):
            named = re.split(r", | and ", things)
            wanted = [one for one in wanted if one not in named]
            wanted += named if verb == "Add" else []
    return Reply(", ".join(wanted) or "nothing")
