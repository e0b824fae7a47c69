"""What the model says in the benchmarks: a tool call per turn, then an answer.

The first message says how many turns: `5 turns, run 17`.
"""

from stepfleet.worker.testing import Reply, RequestRecord, ToolCallReply

_DONE = Reply("done")


def rules(request: RequestRecord) -> Reply:
    """Ask for the tool until the last turn."""
    turns = int(request.question.split(" ", 1)[0])
    if request.turn >= turns:
        return _DONE
    return Reply(tool_calls=(ToolCallReply("look", {"step": request.turn}),))
