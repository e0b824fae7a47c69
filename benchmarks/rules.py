"""What the model says in the benchmarks: a tool call per turn, then an answer.

The first message says how many turns: `5 turns, run 17`; `at length` makes the answer long.
"""

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply

_DONE = Reply("done")
_LONG = Reply("A sentence of some sixty characters, as a model would write it. " * 6)


def rules(request: RequestRecord) -> Reply:
    """Ask for the tool until the last turn."""
    turns = int(request.question.split(" ", 1)[0])
    if request.turn >= turns:
        return _LONG if "at length" in request.question else _DONE
    return Reply(tool_calls=(ToolCallReply("look", {"step": request.turn}),))
