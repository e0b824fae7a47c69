"""A strategy of a user's own, named by reference: `careful_strategy:Careful`."""

from collections.abc import Sequence
from typing import Any

from stepfleet.orchestrator import AgentState, Message, StateChange, Strategy, StrategyContext


class Careful(Strategy):
    """Asks once more before it is content, and tells the model how often it has asked."""

    def __init__(self, checks: int = 1) -> None:
        super().__init__()
        self.checks = checks

    async def process_step(
        self,
        parsed_output: Any,
        tool_result_blocks: Sequence[dict[str, Any]],
        state: AgentState,
        context: StrategyContext,
    ) -> StateChange:
        return StateChange(append={"seen": [f"{context.iteration}: {parsed_output}"]})

    def should_continue(self, parsed_output: Any) -> bool:
        return not str(parsed_output).startswith("sure")

    def get_history(self, state: AgentState) -> list[Any]:
        return list(state.strategy_state.get("seen", ()))

    def prepare_messages(
        self, messages: tuple[Message, ...], state: AgentState
    ) -> tuple[Message, ...]:
        asked = f"checks wanted: {self.checks}, made: {len(self.get_history(state))}"
        return (*messages, Message.user(asked))

    def nudge(self) -> str:
        return "Are you sure?"
