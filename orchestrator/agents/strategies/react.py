"""ReAct: the model thinks, acts and observes until its answer is marked `done`."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from stepfleet.orchestrator.agents.strategies.observations import (
    action_of,
    observation_of,
    says_yes,
    text_field,
)
from stepfleet.orchestrator.agents.strategies.strategy import (
    OutputMode,
    StateChange,
    Strategy,
    StrategyContext,
)
from stepfleet.orchestrator.records.conversation.messages import Block
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.text.redaction import redact

HISTORY = "react_history"

_log = logging.getLogger("stepfleet.strategies.react")

_JSON_FORM = """\
Work in turns of thought, action and observation. Answer each time with one JSON object:
{"thought": "what you think now", "action": {"tool": "name", "arguments": {}}, "done": false}
You get the action's result as the next message. Leave "action" null when you need no tool. When \
you know the answer: {"thought": "...", "action": null, "answer": "the answer", "done": true}"""

_TEXT_FORM = (
    "Before each tool call say in a sentence what you think and why you make the call. When you "
    "know the answer, give it and call no tool."
)


class ReAct(Strategy):
    """Appends thought, action and observation of each step to `react_history`.

    In JSON mode (the default) it goes on until an answer is marked `done`; in text mode, with
    native tool calls, until the model calls no tool. `verbose` logs each step at level INFO. An
    observation is kept up to `observation_limit` characters; the conversation has it whole.
    """

    default_mode: ClassVar[OutputMode] = OutputMode.JSON

    def __init__(
        self,
        *,
        mode: OutputMode | str | None = None,
        verbose: bool = False,
        observation_limit: int = 2000,
    ) -> None:
        super().__init__(mode=mode)
        self.verbose = verbose
        self.observation_limit = observation_limit

    async def process_step(
        self,
        parsed_output: Any,
        tool_result_blocks: Sequence[Block],
        state: AgentState,
        context: StrategyContext,
    ) -> StateChange | None:
        """Append the turn."""
        fields = parsed_output if isinstance(parsed_output, Mapping) else {"thought": parsed_output}
        entry = {
            "thought": text_field(fields, "thought"),
            "action": action_of(context.calls),
            "observation": observation_of(tool_result_blocks, self.observation_limit),
        }
        if self.verbose:
            _log.info(
                "run %s step %d: thought: %s | action: %s | observation: %s",
                context.run_id,
                context.step,
                *(redact(str(entry[name])) for name in ("thought", "action", "observation")),
            )
        return StateChange(append={HISTORY: [entry]})

    def should_continue(self, parsed_output: Any) -> bool:
        """Return whether the model is not done; a text alone never asks for another step."""
        return isinstance(parsed_output, Mapping) and not says_yes(parsed_output.get("done"))

    def get_history(self, state: AgentState) -> list[Any]:
        """Return the entries of this execution."""
        return list(state.strategy_state.get(HISTORY, ()))

    def instructions(self) -> str:
        """Return the form of the answers."""
        return _JSON_FORM if self.mode is OutputMode.JSON else _TEXT_FORM

    def answer(self, parsed_output: Any) -> str | None:
        """Return the answer, or while there is none the thought."""
        if not isinstance(parsed_output, Mapping):
            return None
        return text_field(parsed_output, "answer") or text_field(parsed_output, "thought") or None
