"""Events of one write as they lie in a run's stream, and back to envelopes. Pure.

Stored are the facts that neither the stream's key nor the other events have: the execution and the
parent once, None where they are the usual ones, then type, time and payload of each; packed. A
script that changes a status by itself writes `s` and a list: status, previous status, steps, last
response, execution, parent. Runs of version 1 hold whole envelopes as plain JSON.
"""

from datetime import datetime
from typing import Any

from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.events.envelope import Event, Events, EventType, stamp, status_payload
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.state import AgentState, Lifecycle
from stepfleet.orchestrator.store.records.compression import packed, unpacked

_BY_A_SCRIPT = "s"


def status_event(
    state: AgentState, status: Lifecycle, at: datetime, before: Lifecycle | None = None
) -> Events:
    """Return the event that a run in this state has the status from here on."""
    payload = status_payload(
        status.value,
        before=before.value if before else None,
        steps=state.step_count,
        error=state.last_error if status is Lifecycle.FAILED else None,
        last_response=state.last_output,
    )
    info, parent = state.info, state.parent_agent_id
    return Events([Event(EventType.STATUS, info.id, info.execution_id, at, payload, parent)])


def stored_events(events: Events) -> str:
    """Return the events of one write as they are stored; '' for none."""
    if not events:
        return ""
    first = events[0]
    usual = first.execution_id == _first_execution(first.session_id)
    values: list[Any] = [None if usual else first.execution_id, first.parent_agent_id]
    values += [[event.type, stamp(event.timestamp), event.payload] for event in events]
    return packed(exact_json.text(values))


def load_events(run_id: str, stored: str) -> list[dict[str, Any]]:
    """Return the envelopes of one write, without their numbers. Raises `SerializationError`."""
    try:
        if stored.startswith(_BY_A_SCRIPT):
            return [_status_by_a_script(run_id, *exact_json.loads(stored[1:]))]
        values = exact_json.loads(unpacked(stored))
        if isinstance(values[0], dict):
            return list(values)
        execution, parent, *events = values
        return [_envelope(run_id, execution, parent, *event) for event in events]
    except (ValueError, TypeError, LookupError) as error:
        msg = f"events of the run {run_id} cannot be read: {error}"
        raise SerializationError(msg) from error


def _status_by_a_script(
    run_id: str,
    status: str,
    before: str,
    steps: int,
    response: str | None,
    execution: str | None,
    parent: str | None,
) -> dict[str, Any]:
    payload = status_payload(status, before=before, steps=steps, last_response=response)
    return _envelope(run_id, execution, parent, EventType.STATUS.value, None, payload)


def _envelope(
    run_id: str,
    execution: str | None,
    parent: str | None,
    kind: str,
    at: str | None,
    payload: dict[str, Any],
) -> dict[str, Any]:
    envelope: dict[str, Any] = {
        "type": kind,
        "session_id": run_id,
        "execution_id": execution or _first_execution(run_id),
    }
    if at is not None:
        envelope["timestamp"] = at
    envelope["payload"] = payload
    if parent is not None:
        envelope["parent_agent_id"] = parent
    return envelope


def _first_execution(run_id: str) -> str:
    return f"{run_id}:1"
