"""What a chat window shows of a run, from its stored inputs and steps, and its error. Pure.

The conversation alone: instructions, the fleet's own messages and statuses are left out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from stepfleet.orchestrator.client.rendering.messages import (
    UIMessage,
    UIMetadata,
    UIRole,
    UIToolCall,
    answer_id,
    of_step,
    should_render_assistant_content,
    step_id,
    tool_id,
)
from stepfleet.orchestrator.events.envelope import args_summary
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import Message, result_text
from stepfleet.orchestrator.records.outcome import ContinuationOutcome, StopReason
from stepfleet.orchestrator.records.run.facts import RunFacts
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.records.steps import LoggedStep
from stepfleet.orchestrator.records.usage import UsageStats


@dataclass(frozen=True, slots=True)
class Recorded:
    """A stored conversation: inputs by the step that they precede, and the steps.

    `started_at` is when the run was created (UTC). The log may begin after step 1, where a run's
    memory has trimmed it.
    """

    run_id: str
    started_at: datetime
    inputs: Mapping[int, Sequence[Message]] = field(default_factory=dict)
    log: Sequence[LoggedStep] = ()


def rendered(run: Recorded) -> tuple[UIMessage, ...]:
    """Return the run's history as a chat window shows it, the oldest message first."""
    return tuple(_in_order(run))


def _in_order(run: Recorded) -> Iterator[UIMessage]:
    waiting = sorted(run.inputs)
    at = run.started_at
    for logged in run.log:
        while waiting and waiting[0] < logged.result.step:
            yield from _inputs(run, waiting.pop(0), at)
        yield from _step(run.run_id, logged)
        at = logged.committed_at or logged.result.started_at
    for place in waiting:
        yield from _inputs(run, place, at)


def _inputs(run: Recorded, place: int, at: datetime) -> Iterator[UIMessage]:
    """Yield an input's messages, with the time of the step before it: inputs have none."""
    for number, message in enumerate(run.inputs[place]):
        identity = f"{run.run_id}:input:{place}:{number}"
        if message.is_prompt():
            yield UIMessage(id=identity, role=UIRole.USER, content=message.text, timestamp=at)
        elif message.is_assistant() and message.text:
            yield UIMessage(id=identity, role=UIRole.ASSISTANT, content=message.text, timestamp=at)


def _step(run_id: str, logged: LoggedStep) -> Iterator[UIMessage]:
    result = logged.result
    milliseconds = round(result.duration_ms, 3)
    for number, message in enumerate(_parts(run_id, logged)):
        if number == 0:
            yield message.with_metadata(step_duration_ms=milliseconds, usage=result.usage)
        else:
            yield message


def _parts(run_id: str, logged: LoggedStep) -> Iterator[UIMessage]:
    result = logged.result
    common = UIMetadata(**of_step(result.step))
    calls = tuple(_call(one) for one in result.tool_calls)
    text = _text(logged)
    spoken = text is not None and should_render_assistant_content(text, has_tool_calls=bool(calls))
    if text is not None and spoken:
        yield UIMessage(
            id=step_id(run_id, result.step),
            role=UIRole.ASSISTANT,
            content=text,
            timestamp=result.started_at,
            metadata=common.model_copy(update={"tool_calls": calls, "collapsed": bool(calls)}),
        )
    for record, call in zip(result.tool_calls, calls, strict=True):
        yield _tool(run_id, record, call, common)
    if answer := _answer(logged):
        yield UIMessage(
            id=answer_id(run_id, result.step),
            role=UIRole.ASSISTANT,
            content=answer,
            timestamp=logged.committed_at or result.started_at,
            metadata=common,
        )


def _text(logged: LoggedStep) -> str | None:
    """Return the model's text, or the text shown in its place; None where there is none.

    A model call that failed has left no message.
    """
    own = next((one for one in logged.messages if one.is_assistant()), None)
    if own is None:
        return None
    if logged.progress and logged.progress.output is not None and not logged.result.tool_calls:
        return logged.progress.output
    return own.text if own.text or not logged.result.tool_calls else None


def _answer(logged: LoggedStep) -> str | None:
    """Return the text of an answer that the run's last turn gave by a tool call."""
    progress, outcome = logged.progress, logged.outcome
    goes_on = outcome is not None and outcome.should_continue
    if progress is None or goes_on or not logged.result.tool_calls:
        return None
    return progress.output or (progress.answer.text if progress.answer else None)


def _tool(run_id: str, record: ToolCallRecord, call: UIToolCall, common: UIMetadata) -> UIMessage:
    shown = common.model_copy(
        update={
            "tool_calls": (call,),
            "collapsed": True,
            "tool_call_id": record.call_id,
            "tool_name": record.tool_name,
            "tool_result": None if record.is_error else record.result,
            "tool_error": record.error.message if record.error else None,
            "tool_duration_ms": record.duration_ms,
        }
    )
    return UIMessage(
        id=tool_id(run_id, common.step or 0, record.call_id),
        role=UIRole.TOOL,
        content=record.error.message if record.error else result_text(record),
        timestamp=record.timestamp,
        metadata=shown,
    )


def _call(record: ToolCallRecord) -> UIToolCall:
    return UIToolCall(
        id=record.call_id,
        name=record.tool_name,
        args=record.arguments,
        args_summary=args_summary(record.arguments),
    )


class ErrorBanner(Record):
    """The error of a failed run; `step` is from 1, where one has failed."""

    message: str
    type: str | None = None
    code: str | None = None
    retryable: bool = False
    step: int | None = None
    tool_name: str | None = None


class RunView(Record):
    """A run for display. `continuation` is the newest decision, with all evaluations."""

    run_id: str
    agent_name: str
    status: Lifecycle
    stop_reason: StopReason | None = None
    steps: int = 0
    usage: UsageStats = UsageStats()
    cost_usd: float = 0.0
    messages: tuple[UIMessage, ...] = ()
    banner: ErrorBanner | None = None
    continuation: ContinuationOutcome | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the view as plain JSON-ready data."""
        return {**super().to_dict(), "messages": [one.to_dict() for one in self.messages]}


def view_of(facts: RunFacts, messages: Iterable[UIMessage]) -> RunView:
    """Return the view of a run with that history."""
    return RunView(
        run_id=facts.run_id,
        agent_name=facts.agent_name,
        status=facts.lifecycle,
        stop_reason=facts.stop_reason,
        steps=facts.steps_used,
        usage=facts.usage,
        cost_usd=facts.cost_usd,
        messages=tuple(messages),
        banner=_banner(facts),
        continuation=facts.outcome,
    )


def _banner(facts: RunFacts) -> ErrorBanner | None:
    if facts.error is None:
        return None
    failure = facts.last_failure
    if failure is None:
        return ErrorBanner(message=facts.error)
    return ErrorBanner(
        message=facts.error,
        type=failure.type.value,
        code=failure.code,
        retryable=failure.retryable,
        step=facts.steps[-1].step,
        tool_name=failure.tool_name,
    )
