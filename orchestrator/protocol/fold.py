"""The state of a run as a fold over its log; so any step can be taken back or forked from."""

from collections.abc import Iterable
from datetime import datetime
from functools import reduce
from operator import add, or_
from typing import Any

from stepfleet.orchestrator.continuation.error_policy import next_failures
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.memory_window import Remembered
from stepfleet.orchestrator.records.state import AgentState, LastStep, Lifecycle
from stepfleet.orchestrator.records.steps import HandedOver, LoggedStep, Progress, StepResult
from stepfleet.orchestrator.records.usage import UsageStats, sum_usd


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
    error = result.problems[0].message if result.problems else None
    said = None if progress and progress.is_preamble else result.thought
    results = [record.result for record in result.tool_calls if not record.is_error]
    if kept := [record.custom_state for record in result.tool_calls if record.custom_state]:
        state = state.model_copy(update={"custom_state": reduce(or_, kept, state.custom_state)})
    after = state.model_copy(
        update={
            "info": state.info.add_execution_time(result.duration_ms / 1000).at(now),
            "status": Lifecycle.IN_PROGRESS,
            "messages": state.messages + messages,
            "tool_results": state.tool_results + result.tool_calls,
            "step_count": state.step_count + 1,
            "session_steps": state.session_steps + 1,
            "usage": state.usage + usage,
            "session_usage": state.session_usage + usage,
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
