"""Stored fields to records and back. Pure: bytes and text in, records out."""

from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import TypeAdapter, ValidationError

from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.protocol.claim import Journal
from stepfleet.orchestrator.records.base import SCHEMA_VERSION
from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.records.outcome import ContinuationOutcome
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.results import LostAttempt
from stepfleet.orchestrator.records.state import AgentState, Lifecycle
from stepfleet.orchestrator.records.steps import LoggedStep
from stepfleet.orchestrator.records.tools import ToolCallRecord

Fields = dict[str, str]
READABLE_VERSIONS = frozenset({SCHEMA_VERSION, SCHEMA_VERSION - 1})
MESSAGES = TypeAdapter(tuple[Message, ...])
NOT_IN_SLIM = frozenset({"messages", "tool_results", "last_continuation_outcome", "status"})
EPOCH = datetime.fromtimestamp(0, UTC)


def moment(milliseconds: str | float) -> datetime:
    """Return Redis's time in milliseconds as UTC."""
    return EPOCH + timedelta(milliseconds=int(milliseconds))


def pairs(flat: list[str]) -> Fields:
    """Return the field-value list of a Lua reply as a dict."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def slim(state: AgentState) -> str:
    """Return the hand-off form of a state: all counters, no messages."""
    return state.model_dump_json(exclude=set(NOT_IN_SLIM), exclude_defaults=True)


def check_version(header: Fields) -> None:
    """Raise `SerializationError` for a run written by a newer or a far older version."""
    version = int(header.get("v", "0"))
    if version not in READABLE_VERSIONS:
        msg = (
            f"the run's records have version {version}; this version reads "
            f"{SCHEMA_VERSION - 1} and {SCHEMA_VERSION}: upgrade this worker or client"
        )
        raise SerializationError(msg)


def stored_step(logged: LoggedStep) -> str:
    """Return a log field. Its outcome stands apart: claims read the log, and never outcomes."""
    return logged.model_copy(update={"outcome": None}).to_json()


def load_log(fields: Fields, outcomes: Fields | None = None) -> list[LoggedStep]:
    """Return the committed steps in order, with their outcomes where those were read too.

    Raises `SerializationError` when a record cannot be read.
    """
    numbers = sorted(int(name) for name in fields if name.isdigit())
    try:
        log = [LoggedStep.from_json(fields[str(number)]) for number in numbers]
        return [_with_outcome(step, outcomes) for step in log] if outcomes else log
    except ValidationError as error:
        msg = f"a record of the run cannot be read: {error}"
        raise SerializationError(msg) from error


def load_outcome(stored: str | None) -> ContinuationOutcome | None:
    """Return a stored outcome, if there is one."""
    return ContinuationOutcome.from_json(stored) if stored else None


def _with_outcome(step: LoggedStep, outcomes: Fields) -> LoggedStep:
    outcome = load_outcome(outcomes.get(str(step.result.step - 1)))
    return step.model_copy(update={"outcome": outcome})


def load_messages(system: str, fields: Fields, log: list[LoggedStep]) -> tuple[Message, ...]:
    """Return the conversation: instructions, then inputs and steps in the order of the log."""
    messages = [Message.system(system)] if system else []
    for number in range(len(log) + 1):
        given = fields.get(f"input:{number}")
        if given:
            messages.extend(MESSAGES.validate_json(given))
        if number < len(log):
            messages.extend(log[number].messages)
    return tuple(messages)


def load_state(
    header: Fields, fields: Fields, log: list[LoggedStep], system: str, now: datetime
) -> AgentState:
    """Return the run's state at `now`, with its conversation and tool results.

    Raises `SerializationError` when a record cannot be read.
    """
    check_version(header)
    try:
        state = AgentState.from_json(header["slim"])
        started = header.get("execution_started")
        info = state.info.model_copy(
            update={
                "started_at": moment(header["created"]),
                "updated_at": now,
                "execution_started_at": moment(started) if started else None,
            }
        )
        update: dict[str, Any] = {
            "info": info,
            "status": Lifecycle(header["status"]),
            "messages": load_messages(system, fields, log),
            "tool_results": tuple(call for step in log for call in step.result.tool_calls),
            "stop_requested": header.get("want_note") if header.get("want") == "cancel" else None,
        }
    except (ValidationError, ValueError, KeyError) as error:
        msg = f"a record of the run cannot be read: {error}"
        raise SerializationError(msg) from error
    return state.model_copy(update=update)


def load_journal(fields: Fields) -> Journal:
    """Return what the open step has done already. Raises `SerializationError`."""
    if not fields:
        return Journal()
    response = fields.get("response")
    try:
        return Journal(
            response=LLMResponse.from_json(response) if response else None,
            started=frozenset(int(name[2:]) for name in fields if name.startswith("s:")),
            results={
                int(name[2:]): ToolCallRecord.from_json(value)
                for name, value in fields.items()
                if name.startswith("r:")
            },
        )
    except ValidationError as error:
        msg = f"the journal of the run's open step cannot be read: {error}"
        raise SerializationError(msg) from error


def load_lost(fields: Fields) -> tuple[LostAttempt, ...]:
    """Return the ledger of attempts that were not committed."""
    return tuple(LostAttempt.from_json(value) for value in fields.values())
