"""A simulated model that plays all agents of the team."""

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply

FACTS = {"herring": "Herring swim in schools of millions.", "bridges": "Bridges move in the wind."}


def rules(request: RequestRecord) -> Reply:
    """Answer as the agent whose instructions came with the request."""
    words = request.question.rstrip(".?").split()
    instructions = request.messages[0]["content"]
    if instructions.startswith("You are the reception"):
        to = "archive" if words[0] == "When" else "editor"
        return Reply(tool_calls=(ToolCallReply(f"transfer_to_{to}", {"reason": "their trade"}),))
    if instructions.startswith("You know which issue"):
        return Reply(f"{words[-1].capitalize()} were in issue 7.")
    if request.question.startswith("Write about"):
        subject = words[-1]
        answers = [one for one in request.answers if "goes on with" not in one.content]
        if not answers:
            ask = {"reader": "a teacher", "subject": subject}
            calls = (ToolCallReply("researcher", {"input": subject}), ToolCallReply("critic", ask))
            return Reply(tool_calls=calls)
        return Reply(" ".join(one.content for one in answers))
    if request.question.startswith("What would"):
        return Reply("Why is that?")
    return Reply(FACTS[request.question])
