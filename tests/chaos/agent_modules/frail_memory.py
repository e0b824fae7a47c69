"""A memory policy that ends its process over some conversations: code of a user's own."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from stepfleet.orchestrator import AgentState, Message


def recall(messages: Sequence[Message], state: AgentState) -> Sequence[Message]:
    """Return all messages, or end this process as a fault in native code does."""
    del state
    if any(str(one.content).startswith("poison") for one in messages):
        with Path(os.environ["EFFECTS"]).open("a", encoding="utf-8") as file:
            file.write("poison\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return messages
