"""The strategy without a record: an agent is done when it calls no tool."""

from collections.abc import Sequence
from typing import Any, ClassVar

from stepfleet.orchestrator.agents.strategies.strategy import (
    OutputMode,
    StateChange,
    Strategy,
    StrategyContext,
)
from stepfleet.orchestrator.records.conversation.messages import Block
from stepfleet.orchestrator.records.state import AgentState


class NoOp(Strategy):
    """Records nothing and never requests a step; a tool loop still runs to its end."""

    modes: ClassVar[frozenset[OutputMode]] = frozenset({OutputMode.TEXT})

    async def process_step(
        self,
        parsed_output: Any,
        tool_result_blocks: Sequence[Block],
        state: AgentState,
        context: StrategyContext,
    ) -> StateChange | None:
        """Change nothing."""
        return None

    def should_continue(self, parsed_output: Any) -> bool:
        """Return False."""
        return False

    def get_history(self, state: AgentState) -> list[Any]:
        """Return nothing."""
        return []
