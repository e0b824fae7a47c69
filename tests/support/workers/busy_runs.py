"""Runs that are at work for as long as a test needs them, however fast the machine is."""

import threading
from typing import Any

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply

NO_LIMITS: dict[str, Any] = {"max_steps": 10_000, "token_limit": None, "time_limit": None}
"""Overrides of a run that only the test ends: the usual limits are met within seconds."""


class Busy:
    """Rules of a model: calls of `tool` until the test has struck, and in `turns` turns at least.

    Then an answer that tells the conversation's key. `latency`: seconds of each answer.
    """

    def __init__(self, tool: str = "look", *, turns: int = 0, latency: float = 0.0) -> None:
        self.struck = threading.Event()
        self._tool = tool
        self._turns = turns
        self._latency = latency

    def __call__(self, request: RequestRecord) -> Reply:
        if request.turn >= self._turns and self.struck.is_set():
            return Reply(f"answer to {request.key}", latency=self._latency)
        call = ToolCallReply(self._tool, {"what": f"{request.key}/{request.turn}"})
        return Reply(tool_calls=(call,), latency=self._latency)
