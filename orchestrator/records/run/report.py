"""A run or a step as text: one line, a trace, or everything. Decides wording and nothing else."""

import json
from collections.abc import Iterator
from typing import Any

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import result_text
from stepfleet.orchestrator.records.errors import ErrorInfo
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run.facts import LostAttempt, RunFacts, RunStatus
from stepfleet.orchestrator.records.run.trace import (
    Action,
    FinalAnswer,
    Observation,
    PlanningStep,
    one_line,
    parts_of,
)
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.records.steps import (
    FinishReason,
    Handoff,
    StepErrors,
    StepResult,
    StepType,
)
from stepfleet.orchestrator.records.usage import UsageStats


class DebugSummary(Record):
    """The end of a run. `finish_reason` is that of the last step; costs are in USD."""

    run_id: str
    agent_name: str
    lifecycle: Lifecycle
    status: RunStatus | None = None
    steps: int = 0
    max_iterations: int
    stop_reason: StopReason | None = None
    resolved_by: str | None = None
    reason: str | None = None
    errors: tuple[StepErrors, ...] = ()
    finish_reason: FinishReason | None = None
    usage: UsageStats = UsageStats()
    cost_usd: float = 0.0
    lost_attempts: int = 0

    def __str__(self) -> str:
        """Return a line per field, and one per error."""
        ended = self.status or self.lifecycle
        why = f"{self.stop_reason or 'not stopped'}, resolved by {self.resolved_by or 'nothing'}"
        usage = self.usage
        used = f"{usage.total_tokens} tokens, {usage.llm_calls} calls, {self.cost_usd:.6f} USD"
        if usage.cached_calls:
            used += f", {usage.cached_calls} cached"
        lines = [
            f"run {self.run_id} of {self.agent_name}: {ended}",
            f"steps: {self.steps} of {self.max_iterations}, lost attempts: {self.lost_attempts}",
            f"stop reason: {why}" + (f": {self.reason}" if self.reason else ""),
            f"finish reason: {self.finish_reason or 'none'}",
            f"usage: {used}",
        ]
        lines += [
            f"error in step {failed.step}: {one.type.value} ({one.code}): {one.message}"
            for failed in self.errors
            for one in failed.errors
        ]
        return "\n".join(lines)


def debugged(facts: RunFacts) -> DebugSummary:
    """Return the summary of a run."""
    outcome = facts.outcome
    return DebugSummary(
        run_id=facts.run_id,
        agent_name=facts.agent_name,
        lifecycle=facts.lifecycle,
        status=facts.status,
        steps=facts.steps_used,
        max_iterations=facts.max_iterations,
        stop_reason=facts.stop_reason,
        resolved_by=outcome.resolved_by if outcome else None,
        reason=facts.error or (outcome.reason if outcome else None),
        errors=tuple(
            StepErrors(step=step.step, errors=step.problems)
            for step in facts.steps
            if step.problems
        ),
        finish_reason=facts.steps[-1].finish_reason if facts.steps else None,
        usage=facts.usage,
        cost_usd=facts.cost_usd,
        lost_attempts=len(facts.lost_attempts),
    )


def summarized(facts: RunFacts) -> str:
    """Return status, agent, steps, tool calls by name, tokens and duration on one line."""
    by_name = facts.tool_calls_by_name.items()
    calls = ", ".join(f"{name}\u00d7{count}" for name, count in by_name) or "none"
    parts = (
        f"[{facts.status or facts.lifecycle}] {facts.agent_name}",
        f"steps: {facts.steps_used}/{facts.max_iterations}",
        f"tool calls: {facts.tool_calls_total} ({calls})",
        f"tokens: {facts.usage.total_tokens}{_estimated(facts)}",
        f"duration: {_duration(facts)}",
    )
    return " ".join(" | ".join(parts).split())


def replayed(facts: RunFacts) -> str:
    """Return the readable trace: figures, numbered steps, final and structured output."""
    lines = [*_head(facts), "", "Steps:"]
    for step in facts.steps:
        parts = [part.describe() for part in parts_of(facts, step)] + _model_failures(step)
        if step.fallback:
            parts.append(f"Fallback: {one_line(str(step.fallback))}")
        lines += _numbered(step.step, parts or ["(no text of the model)"])
    return "\n".join([*lines, *_tail(facts)]) + "\n"


def explained(facts: RunFacts) -> str:
    """Return the trace with each step's full fields, lost attempts, and why the run stopped."""
    lines = [*_head(facts), *_ending(facts), "", "Steps:"]
    for step in facts.steps:
        lines += _numbered(step.step, list(_fields(step)))
    if facts.lost_attempts:
        lines += ["", "Lost attempts:", *(f"  {_lost(one)}" for one in facts.lost_attempts)]
    return "\n".join([*lines, *_tail(facts)]) + "\n"


def described(step: StepResult) -> str:
    """Return a step on one line: type, duration, tokens, text, calls and results."""
    tokens = f"{step.usage.total_tokens} tokens" if step.usage else "no usage"
    spent = f"{step.duration_ms:.0f} ms, {'cached' if step.cached else tokens}"
    parts = "; ".join(_step_parts(step)) or "nothing"
    if step.fallback:
        spent += f", fallback {step.fallback.model}"
    return f"step {step.step}: {step.type.value} ({spent}): {parts}"


def _step_parts(step: StepResult) -> Iterator[str]:
    if step.thought:
        ends = step.type is StepType.FINAL_RESPONSE
        part = FinalAnswer(answer=step.thought) if ends else PlanningStep(plan=step.thought)
        yield part.describe()
    for call in step.tool_calls:
        name, identity = call.tool_name, call.call_id
        yield Action(tool_name=name, tool_call_id=identity, arguments=call.arguments).describe()
        text = result_text(call)
        yield Observation(tool_call_id=identity, result=text, is_error=call.is_error).describe()
    in_calls = {call.error.message for call in step.tool_calls if call.error}
    for error in step.problems:
        if error.message not in in_calls:
            yield _error_line(error)


def _head(facts: RunFacts) -> list[str]:
    usage = facts.usage
    split = f"{usage.prompt_tokens} prompt, {usage.completion_tokens} completion"
    return [
        f"Run {facts.run_id} of agent {facts.agent_name}: {facts.status or facts.lifecycle}",
        f"Duration: {_duration(facts)}",
        f"Iterations: {facts.steps_used} of {facts.max_iterations}",
        f"Tokens: {usage.total_tokens} ({split}){_estimated(facts)}",
        *map(_handed, facts.handoffs),
    ]


def _handed(one: Handoff) -> str:
    why = f": {one_line(one.reason)}" if one.reason else ""
    return f"Handed over from {one.by} to {one.to} by step {one.step}{why}"


def _estimated(facts: RunFacts) -> str:
    return " (estimated in part)" if facts.usage_estimated else ""


def _tail(facts: RunFacts) -> list[str]:
    lines = ["", "Final output:", "(none)" if facts.output is None else facts.output]
    if facts.structured is not None:
        name = f" ({facts.schema_name})" if facts.schema_name else ""
        lines += ["", f"Structured output{name}:", _json(facts.structured, indent=2)]
    if facts.error is not None:
        lines += ["", "Error:", facts.error]
    return lines


def _ending(facts: RunFacts) -> Iterator[str]:
    about = " (an estimate: no price is known for a model)" if facts.price_estimated else ""
    lost = facts.lost_cost_usd
    beside = f", and {lost:.6f} USD of attempts that were not committed" if lost else ""
    yield f"Cost: {facts.cost_usd:.6f} USD{about}{beside}"
    yield f"Time in steps: {facts.cumulative_execution_seconds:.2f} s"
    if facts.stop_reason is not None:
        yield f"Stop reason: {facts.stop_reason.value}"
    outcome = facts.outcome
    if outcome is None:
        return
    goes_on = "goes on" if outcome.should_continue else "stops"
    yield f"Last decision: {goes_on}, resolved by {outcome.resolved_by}: {outcome.reason}"
    for evaluation in outcome.evaluations:
        yield (
            f"  {evaluation.decision.value:7} {evaluation.criterion}: {evaluation.reason} "
            f"{_json(evaluation.context)}"
        )


def _fields(step: StepResult) -> Iterator[str]:
    usage = step.usage
    tokens = f"{usage.total_tokens} tokens" if usage else "no usage"
    if step.cached:
        tokens += " (cached)"
    if step.usage_estimated:
        tokens += " (estimated)"
    about = " (at a default price)" if step.price_estimated else ""
    yield (
        f"{step.type.value}, finish reason {step.finish_reason.value}, {tokens}, "
        f"{step.cost_usd:.6f} USD{about}, {step.duration_ms:.0f} ms, "
        f"started {step.started_at.isoformat()}"
    )
    if step.agent:
        yield f"agent: {step.agent}"
    if step.model or step.worker:
        yield f"model: {step.model or 'unknown'}, worker: {step.worker or 'unknown'}"
    if step.fallback:
        yield f"fallback: {one_line(str(step.fallback))}"
    if step.thought:
        yield f"thought: {step.thought}"
    for call in step.tool_calls:
        yield from _call(call)
    yield from _model_failures(step)
    for error in step.errors:
        yield from _traceback(error)


def _call(call: ToolCallRecord) -> Iterator[str]:
    took = "unknown" if call.duration_ms is None else f"{call.duration_ms:.0f} ms"
    repeated = ", repeated after a crash" if call.repeated else ""
    yield f"tool call {call.call_id}: {call.tool_name}, duration {took}{repeated}"
    yield f"  arguments: {_json(call.arguments)}"
    yield f"  error: {'yes' if call.is_error else 'no'}"
    if call.error is not None:
        yield f"  failure: {call.error.type.value} ({call.error.code}): {call.error.message}"
        yield from _traceback(call.error)
    yield f"  result: {_json(call.result)}"


def _traceback(error: ErrorInfo) -> Iterator[str]:
    for line in (error.traceback or "").splitlines():
        yield f"    {line}"


def _model_failures(step: StepResult) -> list[str]:
    return [
        _error_line(error)
        for error in step.problems
        if error.call_id is None and error.tool_name is None
    ]


def _error_line(error: ErrorInfo) -> str:
    return f"Error: {error.type.value} ({error.code}): {one_line(error.message)}"


def _lost(lost: LostAttempt) -> str:
    about = "about " if lost.estimated else ""
    cost = "" if lost.cost_usd is None else f", {about}{lost.cost_usd:.6f} USD"
    doubt = ", a model call may have been paid for" if lost.ambiguous else ""
    why = f": {one_line(lost.reason)}" if lost.reason else ""
    return f"step {lost.step}, {lost.kind}, {lost.seconds:.2f} s{cost}{doubt}{why}"


def _numbered(number: int, lines: list[str]) -> list[str]:
    return [f"{number}. {lines[0]}", *(f"   {line}" for line in lines[1:])]


def _duration(facts: RunFacts) -> str:
    return "n/a" if facts.duration_seconds is None else f"{facts.duration_seconds:.2f}s"


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
