"""Chain of thought: the model reasons step by step until one of them is the final one."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from stepfleet.orchestrator.agents.strategies.observations import says_yes, text_field
from stepfleet.orchestrator.agents.strategies.strategy import (
    OutputMode,
    StateChange,
    Strategy,
    StrategyContext,
)
from stepfleet.orchestrator.records.conversation.messages import Block
from stepfleet.orchestrator.records.state import AgentState

STEPS = "cot_steps"

_JSON_FORM = """\
Reason step by step, one step per answer. Answer each time with one JSON object:
{"step": 1, "reasoning": "how you come to it", "conclusion": "what follows", "final": false}
If a step needs a tool, add "action": {"tool": "name", "arguments": {}}; you get its result as \
the next message. Set "final" to true in the last step; its conclusion is your answer."""

_TEXT_FORM = (
    "Reason step by step, one step per answer. Begin the last one with a line `Final answer:` "
    "and the answer."
)
_FINAL = re.compile(r"^[ \t*#]*final answer\b[ \t*]*:[ \t*]*", re.IGNORECASE | re.MULTILINE)


class ChainOfThought(Strategy):
    """Appends step, reasoning and conclusion of each turn to `cot_steps`.

    It goes on until a step is `final`: in JSON mode (the default) by that field, in text mode
    by a line that begins with `Final answer:`.
    """

    default_mode: ClassVar[OutputMode] = OutputMode.JSON

    async def process_step(
        self,
        parsed_output: Any,
        tool_result_blocks: Sequence[Block],
        state: AgentState,
        context: StrategyContext,
    ) -> StateChange | None:
        """Append the turn."""
        if isinstance(parsed_output, Mapping):
            step = parsed_output.get("step")
            entry = {
                "step": step if isinstance(step, int | str) else context.iteration,
                "reasoning": text_field(parsed_output, "reasoning"),
                "conclusion": text_field(parsed_output, "conclusion"),
            }
        else:
            reasoning, _, conclusion = _parted(str(parsed_output))
            entry = {"step": context.iteration, "reasoning": reasoning, "conclusion": conclusion}
        return StateChange(append={STEPS: [entry]})

    def should_continue(self, parsed_output: Any) -> bool:
        """Return whether this was not the final step."""
        if isinstance(parsed_output, Mapping):
            return not says_yes(parsed_output.get("final"))
        return not _parted(str(parsed_output))[1]

    def get_history(self, state: AgentState) -> list[Any]:
        """Return the steps of this execution."""
        return list(state.strategy_state.get(STEPS, ()))

    def instructions(self) -> str:
        """Return the form of the answers."""
        return _JSON_FORM if self.mode is OutputMode.JSON else _TEXT_FORM

    def answer(self, parsed_output: Any) -> str | None:
        """Return the conclusion."""
        if isinstance(parsed_output, Mapping):
            return text_field(parsed_output, "conclusion") or None
        return _parted(str(parsed_output))[2] or None


def _parted(text: str) -> tuple[str, bool, str]:
    """Return the text before the final answer's label, whether it is there, and the answer."""
    found = _FINAL.search(text)
    if found is None:
        return text.strip(), False, ""
    return text[: found.start()].strip(), True, text[found.end() :].strip()
