"""The messages that single events become, from their payloads. Pure."""

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
    indicator,
    of_step,
    step_id,
    tool_id,
)
from stepfleet.orchestrator.events.envelope import args_summary

Payload = Mapping[str, Any]


def status_message(
    identity: str, text: str, at: datetime, kind: StatusType, **metadata: Any
) -> UIMessage:
    """Return a message of the fleet's own, of that kind."""
    about = UIMetadata(status_type=kind, **metadata)
    return UIMessage(id=identity, role=UIRole.STATUS, content=text, timestamp=at, metadata=about)


def started_tool(run_id: str, step: int, payload: Payload, at: datetime) -> UIMessage:
    """Return the status of a running tool; the tool's message replaces it, by its id."""
    args = payload.get("args")
    call = UIToolCall(
        id=payload["tool_call_id"],
        name=payload["tool_name"],
        args=args,
        args_summary=payload.get("args_summary", "") if args is None else args_summary(args),
    )
    return status_message(
        tool_id(run_id, step, payload["tool_call_id"]),
        indicator([call]),
        at,
        StatusType.TOOL_CALL,
        tool_calls=(call,),
        tool_call_id=call.id,
        tool_name=call.name,
        **of_step(step),
    )


def ended_tool(
    run_id: str, step: int, payload: Payload, at: datetime, started: UIMessage | None
) -> UIMessage:
    """Return the message of a tool that has ended; `started` is the status that it replaces."""
    result = payload["result_summary"] if payload["success"] else None
    error = None if payload["success"] else payload["error"]
    metadata = UIMetadata(
        tool_calls=started.metadata.tool_calls if started and started.metadata else (),
        tool_call_id=payload["tool_call_id"],
        tool_name=payload["tool_name"],
        tool_result=result,
        tool_error=error,
        tool_duration_ms=payload["duration_ms"],
        collapsed=True,
        **of_step(step),
    )
    return UIMessage(
        id=tool_id(run_id, step, payload["tool_call_id"]),
        role=UIRole.TOOL,
        content=(result if payload["success"] else error) or "",
        timestamp=started.timestamp if started else at,
        metadata=metadata,
    )


def retry_message(run_id: str, payload: Payload, at: datetime, attempts: int | None) -> UIMessage:
    """Return the status of a failed model call that is repeated.

    `attempts` is the most that there are; None where that is not known.
    """
    step, coming = payload["step_number"], payload["attempt"] + 1
    most = attempts if attempts is not None and coming <= attempts else None
    seconds = payload["retry_in_seconds"]
    retry = UIRetry(attempt=coming, of=most, retry_in_seconds=seconds)
    which = f"attempt {coming}" + (f" of {most}" if most else "")
    text = f"{which} in {seconds:.1f} s: {payload['error']}"
    identity = f"{step_id(run_id, step)}:retry"
    return status_message(identity, text, at, StatusType.INFO, retry=retry, **of_step(step))


def continuation_message(run_id: str, payload: Payload, at: datetime) -> UIMessage:
    """Return the status that names why a run stops, and which criterion decided it."""
    decision = UIContinuation(**{name: payload[name] for name in UIContinuation.model_fields})
    text = f"Stopped: {decision.stop_reason} ({decision.resolved_by})"
    identity = f"{run_id}:continuation"
    return status_message(identity, text, at, StatusType.CONTINUATION, continuation=decision)
