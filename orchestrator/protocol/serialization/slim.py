"""Slim snapshots: a run's state as a small dict for a database or a user interface, and back.

Texts are cut and old messages left out, so a snapshot is for looking at a run and for going on
from its gist; the exact form is a checkpoint. Steps are diagnostic and are not read back.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_jsonable_python

from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.protocol.serialization.slim_config import SlimSerializationConfig
from stepfleet.orchestrator.protocol.serialization.slim_messages import (
    newest_messages,
    slim_calls,
    slim_message,
    whole_message,
)
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.errors import ErrorContext
from stepfleet.orchestrator.records.outcome import brief
from stepfleet.orchestrator.records.state import AgentState, Lifecycle, StateInfo
from stepfleet.orchestrator.records.steps import StepResult, StepType
from stepfleet.orchestrator.records.text.validation import explain_invalid
from stepfleet.orchestrator.records.usage import UsageStats

VERSION = 1
"""Version of snapshots. Readers accept this one and the one before it."""
OLDEST_READABLE = VERSION - 1


class CanSerializeAgentState(Protocol):
    """Converts a state into JSON data and back."""

    def serialize(self, state: AgentState) -> dict[str, Any]:
        """Return the state as JSON data."""

    def deserialize(self, data: Mapping[str, Any]) -> AgentState:
        """Return the state that `data` holds."""


class SlimSerializer:
    """Serializes states by a `SlimSerializationConfig`, the standard one if none is given."""

    def __init__(self, config: SlimSerializationConfig | None = None) -> None:
        self.config = config or SlimSerializationConfig.standard()

    def serialize(self, state: AgentState, steps: Sequence[StepResult] = ()) -> dict[str, Any]:
        """Return the snapshot of a state; `steps` are those that the run has committed."""
        config = self.config
        kept = newest_messages(state.messages, config.kept_messages)
        recent = steps[-config.kept_steps :] if config.kept_steps else ()
        info, failures = state.info, state.failures
        outcome = state.last_continuation_outcome if config.include_continuation_trace else None
        return {
            "version": VERSION,
            "agent_id": state.agent_id,
            "parent_agent_id": state.parent_agent_id,
            "status": state.status.value,
            "step_count": state.step_count,
            "usage": _usage(state.usage),
            "execution": {
                "number": info.execution,
                "started_at": info.started_at.isoformat(),
                "updated_at": info.updated_at.isoformat(),
                "cumulative_seconds": info.cumulative_execution_seconds,
            },
            "failures": failures.model_dump(mode="json", exclude_defaults=True),
            "messages": [slim_message(message, config) for message in kept],
            "steps": [_step(step) for step in recent],
            "last_continuation": brief(outcome) if outcome else None,
            "metadata": to_jsonable_python(state.metadata),
        }

    def deserialize(self, data: Mapping[str, Any]) -> AgentState:
        """Return the state of a snapshot: ids, counters, clocks, and the messages it kept.

        Reads this version, the one before, and snapshots without a version. Raises
        `SerializationError` for a newer one, or for what is no snapshot.
        """
        _check_version(data.get("version", OLDEST_READABLE))
        try:
            snapshot = _Snapshot.model_validate(dict(data))
            messages = tuple(whole_message(one) for one in snapshot.messages)
        except ValidationError as error:
            msg = f"this is no snapshot of a run: {explain_invalid(error)}"
            raise SerializationError(msg) from error
        return _state(snapshot, messages)


class _Execution(BaseModel):
    model_config = ConfigDict(extra="forbid")

    number: int = 1
    started_at: datetime
    updated_at: datetime
    cumulative_seconds: float = 0.0


class _Snapshot(BaseModel):
    """The shape of a snapshot as it is read."""

    model_config = ConfigDict(extra="forbid")

    version: int = OLDEST_READABLE
    agent_id: str
    parent_agent_id: str | None = None
    status: Lifecycle
    step_count: int = Field(default=0, ge=0)
    usage: dict[str, int] = Field(default_factory=dict)
    execution: _Execution
    failures: ErrorContext = Field(default_factory=ErrorContext)
    messages: list[dict[str, Any]] = Field(default_factory=list)
    steps: list[dict[str, Any]] = Field(default_factory=list)
    last_continuation: dict[str, Any] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


def _check_version(version: Any) -> None:
    if isinstance(version, int) and OLDEST_READABLE <= version <= VERSION:
        return
    msg = (
        f"field 'version' of the snapshot is {version!r}; this version of Stepfleet reads "
        f"{OLDEST_READABLE} and {VERSION}: upgrade Stepfleet"
    )
    raise SerializationError(msg)


def _usage(usage: UsageStats) -> dict[str, int]:
    return {
        "prompt": usage.prompt_tokens,
        "completion": usage.completion_tokens,
        "total": usage.total_tokens,
    }


def _step(step: StepResult) -> dict[str, Any]:
    return {
        "step_number": step.step,
        "type": "final" if step.type is StepType.FINAL_RESPONSE else step.type.value,
        "has_tool_calls": step.has_tool_calls,
        "finish_reason": step.finish_reason.value,
        "errors": len(step.errors),
        "usage": {"total": step.usage.total_tokens if step.usage else 0},
        "duration_ms": step.duration_ms,
        "tool_calls": slim_calls(step.tool_calls),
    }


def _state(snapshot: _Snapshot, messages: tuple[Message, ...]) -> AgentState:
    times, number = snapshot.execution, snapshot.execution.number
    usage = UsageStats(
        prompt_tokens=snapshot.usage.get("prompt", 0),
        completion_tokens=snapshot.usage.get("completion", 0),
        total_tokens=snapshot.usage.get("total", 0),
    )
    return AgentState(
        agent_id=snapshot.agent_id,
        parent_agent_id=snapshot.parent_agent_id,
        info=StateInfo(
            id=snapshot.agent_id,
            execution_id=f"{snapshot.agent_id}:{number}",
            execution=number,
            started_at=times.started_at,
            updated_at=times.updated_at,
            cumulative_execution_seconds=times.cumulative_seconds,
        ),
        status=snapshot.status,
        messages=messages,
        step_count=snapshot.step_count,
        session_steps=snapshot.step_count,
        usage=usage,
        session_usage=usage,
        failures=snapshot.failures,
        metadata=snapshot.metadata,
    )
