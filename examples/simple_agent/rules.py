"""A simulated model that does what the agent's instructions say."""

from stepfleet.worker.testing import Reply, RequestRecord


def rules(request: RequestRecord) -> Reply:
    """Repeat the question in capital letters."""
    return Reply(request.question.upper())
