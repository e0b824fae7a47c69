"""The messages that single events become. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from stepfleet.orchestrator.client.rendering.messages import (
    StatusType,
    UIContinuation,
    UIMessage,
    UIMetadata,
    UIRetry,
    UIRole,
    UIToolCall,
    group_of,
    step_id,
    tool_id,
)
from stepfleet.orchestrator.client.rendering.rules import indicator
from stepfleet.orchestrator.events.envelope import args_summary


def thinking(run_id: str, at: datetime) -> UIMessage:
    """Return the status of a run that is at work."""
    return _status(
        f"{run_id}:thinking", "Thinking...", at, UIMetadata(status_type=StatusType.THINKING)
    )


def started_tool(run_id: str, step: int, told: Mapping[str, Any], at: datetime) -> UIMessage:
    """Return the status of a tool that runs; its message comes in the same place, by its id."""
    args = told.get("args")
    call = UIToolCall(
        id=told["tool_call_id"],
        name=told["tool_name"],
        args=args,
        args_summary=told.get("args_summary", "") if args is None else args_summary(args),
    )
    metadata = UIMetadata(
        status_type=StatusType.TOOL_CALL,
        tool_calls=(call,),
        tool_call_id=call.id,
        tool_name=call.name,
        step=step,
        group=group_of(step),
    )
    return _status(tool_id(run_id, step, told["tool_call_id"]), indicator([call]), at, metadata)


def tool_of(
    run_id: str, step: int, told: Mapping[str, Any], at: datetime, started: UIMessage | None
) -> UIMessage:
    """Return the message of a tool that has ended; `started` is the status that it replaces."""
    metadata = UIMetadata(
        tool_calls=started.metadata.tool_calls if started and started.metadata else (),
        tool_call_id=told["tool_call_id"],
        tool_name=told["tool_name"],
        tool_result=told["result_summary"] if told["success"] else None,
        tool_error=None if told["success"] else told["error"],
        tool_duration_ms=told["duration_ms"],
        step=step,
        group=group_of(step),
        collapsed=True,
    )
    return UIMessage(
        id=tool_id(run_id, step, told["tool_call_id"]),
        role=UIRole.TOOL,
        content=(told["result_summary"] if told["success"] else told["error"]) or "",
        timestamp=started.timestamp if started else at,
        metadata=metadata,
    )


def retry_message(
    run_id: str, told: Mapping[str, Any], at: datetime, attempts: int | None
) -> UIMessage:
    """Return the status of a model call that failed and is made again.

    `attempts` is how many there are at most, and None where that is not known.
    """
    step, coming = told["step_number"], told["attempt"] + 1
    most = attempts if attempts is not None and coming <= attempts else None
    seconds = told["retry_in_seconds"]
    retry = UIRetry(attempt=coming, of=most, retry_in_seconds=seconds)
    which = f"attempt {coming}" + (f" of {most}" if most else "")
    metadata = UIMetadata(status_type=StatusType.INFO, step=step, group=group_of(step), retry=retry)
    text = f"{which} in {seconds:.1f} s: {told['error']}"
    return _status(f"{step_id(run_id, step)}:retry", text, at, metadata)


def error_message(identity: str, text: str, at: datetime, step: int | None = None) -> UIMessage:
    """Return the status of a failure; it stays in view when the run has ended."""
    return _status(identity, text, at, UIMetadata(status_type=StatusType.ERROR, step=step))


def continuation_message(run_id: str, decision: UIContinuation, at: datetime) -> UIMessage:
    """Return the status that names why a run stops, and who said so."""
    metadata = UIMetadata(status_type=StatusType.CONTINUATION, continuation=decision)
    text = f"Stopped: {decision.stop_reason} ({decision.resolved_by})"
    return _status(f"{run_id}:continuation", text, at, metadata)


def _status(identity: str, text: str, at: datetime, metadata: UIMetadata) -> UIMessage:
    return UIMessage(id=identity, role=UIRole.STATUS, content=text, timestamp=at, metadata=metadata)
