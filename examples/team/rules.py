"""A simulated model that plays the editor, the researcher and the critic."""

from stepfleet.worker.testing import Reply, RequestRecord, ToolCallReply

FACTS = {"herring": "Herring swim in schools of millions.", "bridges": "Bridges move in the wind."}


def rules(request: RequestRecord) -> Reply:
    """Answer as the agent whose instructions came with the request."""
    words = request.question.rstrip(".?").split()
    if request.question.startswith("Write about"):
        subject = words[-1]
        if not request.answers:
            ask = {"reader": "a teacher", "subject": subject}
            calls = (ToolCallReply("researcher", {"input": subject}), ToolCallReply("critic", ask))
            return Reply(tool_calls=calls)
        return Reply(" ".join(one.content for one in request.answers))
    if request.question.startswith("What would"):
        return Reply("Why is that?")
    return Reply(FACTS[request.question])
