"""A simulated model that does what the agent's instructions say."""

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply


def rules(request: RequestRecord) -> Reply:
    """Repeat the question in capital letters."""
    return Reply(request.question.upper())
