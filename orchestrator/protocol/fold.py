"""The state of a run as a fold over its log; so any step can be taken back or forked from."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from operator import add, or_
from typing import Any

import orjson

from stepfleet.orchestrator.agents.prompt import places_in, worded
from stepfleet.orchestrator.continuation.error_policy import next_failures
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.memory_window import Remembered
from stepfleet.orchestrator.records.state import AgentState, LastStep, Lifecycle
from stepfleet.orchestrator.records.steps import HandedOver, LoggedStep, Progress, StepResult
from stepfleet.orchestrator.records.usage import UsageStats, sum_usd

LONGEST = 8_000
"""Characters of one result in an input."""
LONGEST_TEXT = 100_000
"""Characters of the text around them."""
_ROOM = 900_000
"""Bytes of all results in an input together, which may have 1 MiB."""
_LONGEST_ID = 100
_BESIDE = 60
"""Bytes of a result's JSON without its id and its text, and of the note that it was cut."""
_PLACE = re.compile(r"(?<!\{)\{([^{}]+)\}(?!\})")
NO_TEXT = "(no text)"
OUTPUT, OUTPUTS, COUNT = "output", "outputs", "count"


@dataclass(frozen=True, slots=True)
class Before:
    """A run that has ended: its line's id or its own, its answer, or why there is none."""

    name: str
    text: str | None
    error: str | None = None


def check_places(
    text: str, known: Collection[str], field: str = "input", *, required: bool = True
) -> None:
    """Raise `ConfigurationError` for an unknown place, or for a text without any."""
    if not isinstance(text, str):
        raise ConfigurationError(f"field {field!r} must be text; write one with {_shown(known)}")
    if len(text) > LONGEST_TEXT:
        msg = f"field {field!r} has {len(text):,} characters; the limit is {LONGEST_TEXT:,}"
        raise ConfigurationError(f"{msg}: put more into the agent's instructions")
    try:
        places = places_in(text)
    except ValueError as error:
        raise ConfigurationError(f"field {field!r}: {error}") from None
    unknown = [one for one in places if one not in known]
    if unknown or (required and not places):
        why = f"names {{{unknown[0][:60]}}}" if unknown else "names no result"
        raise ConfigurationError(f"field {field!r} {why}; there are: {_shown(known)}")


def check_data(given: Any, known: Collection[str], field: str = "input") -> None:
    """Raise `ConfigurationError` where data names a place, which only a text can have."""
    left: list[Any] = [given] if isinstance(given, Mapping) else []
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
        elif isinstance(one, str) and (places := set(_PLACE.findall(one)) & set(known)):
            msg = f"field {field!r} is a dict and names {{{min(places)[:60]}}}: only a text has"
            raise ConfigurationError(f"{msg} places for results; write one: 'Use: {{output}}'")


def places_of(names: Collection[str]) -> tuple[str, ...]:
    """Return the places that an input after runs of these names may have."""
    return (*((OUTPUT,) if len(names) == 1 else ()), OUTPUTS, COUNT, *names)


def composed(text: str, before: Sequence[Before], others: Mapping[str, str]) -> str:
    """Return `text` with the results in their places.

    `{output}` is the first result, `{outputs}` a JSON list of them all, `{count}` their number;
    `others` are further texts. Raises `ConfigurationError` for a place that is none of these.
    """
    places = places_in(text)
    weight = sum(len(before) if one == OUTPUTS else 1 for one in places)
    room = (_ROOM - len(text.encode())) // max(weight, 1)
    texts = {OUTPUT: _text(before[0]), COUNT: str(len(before)), **others}
    values = {name: cut(value, room) for name, value in texts.items() if name in places}
    if OUTPUTS in places:
        values[OUTPUTS] = "[" + ",\n".join(_item(one, room) for one in before) + "]"
    return worded(text, values)


def answer_text(output: str | None, structured: Any) -> str:
    """Return a run's answer as a text: its data as JSON, where it has some."""
    if structured is not None:
        return json.dumps(structured, ensure_ascii=False)
    return output if output and output.strip() else NO_TEXT


def cut(text: str, room: int, most: int = LONGEST) -> str:
    """Return the beginning of a text: `most` characters, and no more than `room` bytes of JSON."""
    text = text.encode("utf-8", "replace").decode()
    kept = min(len(text), most)
    while kept and (size := len(orjson.dumps(text[:kept]))) > room:
        kept = min(kept - 1, kept * max(room, 0) // size)
    left = len(text) - kept
    return f"{text[:kept]} [{left:,} more characters]" if left else text


def _item(one: Before, room: int) -> str:
    name = one.name.encode("utf-8", "replace").decode()[:_LONGEST_ID]
    left = room - len(orjson.dumps(name)) - _BESIDE
    kind = "error" if one.text is None else OUTPUT
    return orjson.dumps({"id": name, kind: cut(_text(one), left)}).decode()


def _text(one: Before) -> str:
    return one.error or NO_TEXT if one.text is None else one.text


def _shown(known: Collection[str]) -> str:
    names = [f"{{{one}}}" for one in list(known)[:10]]
    return ", ".join(names) + (" and more" if len(known) > len(names) else "")


def after_step(
    state: AgentState,
    result: StepResult,
    messages: tuple[Message, ...],
    now: datetime,
    progress: Progress | None = None,
    remembered: Remembered | None = None,
    handoff: HandedOver | None = None,
) -> AgentState:
    """Return the state after a step: its time, usage, cost, failures and messages added.

    The messages of `progress` are expected among `messages`. After a `handoff` the next agent gets
    the conversation, metadata, custom state and counters; not the reasoning, the answer and the
    window of the one before.
    """
    usage = result.usage or UsageStats()
    used = state.usage + usage
    is_first = state.session_usage == state.usage  # as in each run's first execution
    error = result.problems[0].message if result.problems else None
    said = None if progress and progress.is_preamble else result.thought
    results = [record.result for record in result.tool_calls if not record.is_error]
    if kept := [record.custom_state for record in result.tool_calls if record.custom_state]:
        state = state.model_copy(update={"custom_state": reduce(or_, kept, state.custom_state)})
    seconds = state.info.cumulative_execution_seconds + result.duration_ms / 1000
    clocks = {"cumulative_execution_seconds": seconds, "updated_at": now}
    after = state.model_copy(
        update={
            "info": state.info.model_copy(update=clocks),
            "status": Lifecycle.IN_PROGRESS,
            "messages": state.messages + messages,
            "tool_results": state.tool_results + result.tool_calls,
            "step_count": state.step_count + 1,
            "session_steps": state.session_steps + 1,
            "usage": used,
            "session_usage": used if is_first else state.session_usage + usage,
            "cost_usd": sum_usd(state.cost_usd, result.cost_usd),
            "session_cost_usd": sum_usd(state.session_cost_usd, result.cost_usd),
            "current_step": LastStep.of(result),
            "failures": next_failures(state.failures, result),
            "last_error": error or state.last_error,
            "last_output": said or state.last_output,
            "last_result": results[-1] if results else state.last_result,
            "window": remembered.window if remembered else state.window,
            **_below(state, result),
            **(_progressed(state, progress) if progress else {}),
        }
    )
    return _handed_over(after, trims=handoff.trims) if handoff else after


def _handed_over(state: AgentState, *, trims: bool) -> AgentState:
    window = state.window
    if window is not None:
        is_gone = trims or window.trimmed
        window = window.model_copy(update={"limit": None, "trimmed": True}) if is_gone else None
    return state.model_copy(update={"strategy_state": {}, "answer": None, "window": window})


def _below(state: AgentState, result: StepResult) -> dict[str, Any]:
    """Return the totals of runs below, where the step's calls have started some."""
    if not (runs := result.runs):
        return {}
    usage = reduce(add, (one.total_usage for one in runs))
    cost = sum(one.total_cost_usd for one in runs)
    return {
        "below_usage": state.below_usage + usage,
        "session_below_usage": state.session_below_usage + usage,
        "below_cost_usd": sum_usd(state.below_cost_usd, cost),
        "session_below_cost_usd": sum_usd(state.session_below_cost_usd, cost),
    }


def _progressed(state: AgentState, progress: Progress) -> dict[str, Any]:
    """Return the fields that a step changed beyond its result."""
    changed: dict[str, Any] = {
        "strategy_state": _strategy_state(state.strategy_state, progress),
        "custom_state": {**state.custom_state, **progress.custom_state},
    }
    if progress.output and not progress.is_preamble:
        changed["last_output"] = progress.output
    if progress.answer:
        changed["answer"] = progress.answer
        if progress.answer.text is not None:
            changed["last_output"] = progress.answer.text
    return changed


def _strategy_state(before: dict[str, Any], progress: Progress) -> dict[str, Any]:
    after = {**before, **progress.strategy_state}
    for name, items in progress.strategy_append.items():
        after[name] = [*after.get(name, ()), *items]
    return after


def rebuild(initial: AgentState, log: Iterable[LoggedStep]) -> AgentState:
    """Return the state after the steps of `log`, starting from `initial`."""
    state = initial
    for logged in log:
        while state.info.execution < logged.execution:
            state = state.next_execution()
        moment = logged.committed_at or logged.result.started_at
        state = after_step(
            state,
            logged.result,
            logged.messages,
            moment,
            logged.progress,
            logged.remembered,
            logged.handoff,
        )
        if logged.outcome:
            state = state.with_continuation_outcome(logged.outcome)
    return state
