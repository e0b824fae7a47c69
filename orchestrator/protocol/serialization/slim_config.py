"""What a slim snapshot keeps, and the three presets."""

from typing import Self

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.state import AgentState

NOT_IN_HANDOFF = frozenset({"messages", "tool_results", "last_continuation_outcome", "status"})
"""Held elsewhere: messages and tool results in the log, outcome and status beside the state."""
_EXCLUDED = set(NOT_IN_HANDOFF)


def handoff(state: AgentState) -> str:
    """Return the hand-off form of a state (JSON): everything but what is held elsewhere."""
    return state.model_dump_json(exclude=_EXCLUDED, exclude_defaults=True)


class SlimSerializationConfig(Record):
    """Limits of a snapshot; the defaults are the standard preset.

    The newest `max_messages` messages and `max_steps` steps are kept, none for a limit of 0 or
    less. Text above `max_content_length` characters is cut and marked `...`.
    """

    max_messages: int = 50
    max_steps: int = 20
    max_content_length: int = 2000
    include_tool_results: bool = True
    include_steps: bool = True
    include_continuation_trace: bool = False
    redact_tool_args: bool = False

    @classmethod
    def minimal(cls) -> Self:
        """Return the preset for lists of many runs: a few short messages, no steps, no results."""
        return cls(
            max_messages=20,
            max_steps=0,
            max_content_length=500,
            include_tool_results=False,
            include_steps=False,
        )

    @classmethod
    def standard(cls) -> Self:
        """Return the preset for a user interface or a database."""
        return cls()

    @classmethod
    def full(cls) -> Self:
        """Return the preset for looking into a run, with the newest decision."""
        return cls(
            max_messages=100,
            max_steps=50,
            max_content_length=5000,
            include_continuation_trace=True,
        )

    @property
    def kept_steps(self) -> int:
        """How many steps are kept."""
        return max(self.max_steps, 0) if self.include_steps else 0

    @property
    def kept_messages(self) -> int:
        """How many messages are kept."""
        return max(self.max_messages, 0)
