"""The rules behind `stepfleet bench`: each run's input plans its model's answers and their delays.

The input is JSON: `seconds` before each answer, `tools` (whether an answer asks for the tool
`work`), and `tool_seconds`. The last answer ends the run.
"""

from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario.replies import Reply, ToolCallReply


def rules(request: RequestRecord) -> Reply:
    """Return the planned answer. Raises `ValueError` for an input that is no plan."""
    plan = exact_json.loads(request.question)
    last = len(plan["seconds"]) - 1
    place = min(request.turn - 1, last)
    seconds = float(plan["seconds"][place])
    if place == last:
        return Reply("done", latency=seconds)
    if plan["tools"][place]:
        call = ToolCallReply("work", {"seconds": plan["tool_seconds"]})
        return Reply(tool_calls=(call,), latency=seconds)
    return Reply("more", latency=seconds)
