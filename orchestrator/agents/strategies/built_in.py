"""The built-in strategies, and finding one by its name or reference."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, ClassVar

from stepfleet.orchestrator.agents.strategies.strategy import (
    OutputMode,
    StateChange,
    Strategy,
    StrategyContext,
    action_of,
    observation_of,
    says_yes,
    text_field,
)
from stepfleet.orchestrator.errors import AgentException, ConfigurationError
from stepfleet.orchestrator.records.conversation.messages import Block
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.text.redaction import redact
from stepfleet.orchestrator.records.text.validation import with_article
from stepfleet.orchestrator.references import load_reference


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


STEPS = "cot_steps"

_THOUGHT_JSON_FORM = """\
Reason step by step, one step per answer. Answer each time with one JSON object:
{"step": 1, "reasoning": "how you come to it", "conclusion": "what follows", "final": false}
If a step needs a tool, add "action": {"tool": "name", "arguments": {}}; you get its result as \
the next message. Set "final" to true in the last step; its conclusion is your answer."""

_THOUGHT_TEXT_FORM = (
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
        return _THOUGHT_JSON_FORM if self.mode is OutputMode.JSON else _THOUGHT_TEXT_FORM

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


ENTRY_POINTS = "stepfleet.strategies"
"""Packages register strategies by entry points of this group: `name = "package:Class"`."""
OBJECT = "object:"
"""Prefix of the stored name of a strategy that was given as an object."""
BUILT_IN: Mapping[str, type[Strategy]] = {
    "noop": NoOp,
    "react": ReAct,
    "chain_of_thought": ChainOfThought,
    "cot": ChainOfThought,
}


def is_reference(name: str) -> bool:
    """Return whether `name` points into code: `module:attribute`, or a given object."""
    return ":" in name


def stored_name(strategy: Strategy | str) -> str:
    """Return the name of a strategy in a run's configuration."""
    return strategy if isinstance(strategy, str) else f"{OBJECT}{type(strategy).__name__}"


def json_strategy(name: str | None, options: Mapping[str, Any]) -> str | None:
    """Return the class of a built-in strategy that is in JSON mode; None for all others.

    The modes of other strategies are known only where their code is.
    """
    kind = BUILT_IN.get(name or "")
    in_json_mode = kind and (options.get("mode") or kind.default_mode) == OutputMode.JSON
    return kind.__name__ if kind and in_json_mode else None


def make_strategy(name: str, options: Mapping[str, Any]) -> Strategy:
    """Return the strategy of that registered name or `module:attribute` reference.

    Raises `ConfigurationError` that names the field and the fix.
    """
    found = load_reference(name, "field 'strategy'") if is_reference(name) else _registered(name)
    if isinstance(found, Strategy):
        if options:
            msg = f"field 'strategy_options': {name!r} is a finished object; name its class instead"
            raise ConfigurationError(msg)
        return found
    return _made(name, found, options)


def _made(name: str, factory: Any, options: Mapping[str, Any]) -> Strategy:
    if not callable(factory):
        kind = with_article(type(factory).__name__)
        msg = f"field 'strategy': {name!r} is {kind}, neither class nor object"
        raise ConfigurationError(msg)
    try:
        made: Any = factory(**options)
    except AgentException:
        raise
    except Exception as error:
        msg = f"field 'strategy_options': {name!r} cannot be made with them: {error}"
        raise ConfigurationError(msg) from error
    if not isinstance(made, Strategy):
        msg = f"field 'strategy': {name!r} made a {type(made).__name__}; subclass Strategy"
        raise ConfigurationError(msg)
    return made


def _registered(name: str) -> Callable[..., Any]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    for found in metadata.entry_points(group=ENTRY_POINTS, name=name):
        factory: Callable[..., Any] = found.load()
        return factory
    known = ", ".join(sorted(BUILT_IN))
    raise ConfigurationError(
        f"field 'strategy': there is no strategy {name!r} (known: {known}); name one of them, a "
        f"reference 'module:attribute', or an entry point in {ENTRY_POINTS!r}"
    )
