"""Stored fields to records and back. Pure: bytes and text in, records out."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.events.envelope import Event, Events, EventType, stamp, status_payload
from stepfleet.orchestrator.memory.window import History, Messages, Part
from stepfleet.orchestrator.protocol.attempt import Wait
from stepfleet.orchestrator.protocol.claim import Journal, Outage, Want
from stepfleet.orchestrator.protocol.serialization import handoff
from stepfleet.orchestrator.protocol.waiting import StepWait, WaitReason
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.base import SCHEMA_VERSION
from stepfleet.orchestrator.records.calls.answers import Answer
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.ledger import bare_name
from stepfleet.orchestrator.records.memory_window import Remembered, Window
from stepfleet.orchestrator.records.outcome import ContinuationOutcome
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.records.state import (
    AgentState,
    EndState,
    HandOff,
    Lifecycle,
    ToolResults,
    Used,
)
from stepfleet.orchestrator.records.steps import (
    LoggedErrors,
    LoggedResult,
    LoggedStep,
    RunAgent,
)
from stepfleet.orchestrator.records.usage import NANO, LostUse, Spent
from stepfleet.orchestrator.store.compression import packed, unpacked

Fields = dict[str, str]
READABLE_VERSIONS = frozenset({SCHEMA_VERSION, SCHEMA_VERSION - 1})
MESSAGES: TypeAdapter[Messages] = TypeAdapter(Messages)
EPOCH = datetime.fromtimestamp(0, UTC)
_NOTHING_LOST = LostUse()
_NOTHING_JOURNALED = Journal()
_BY_A_SCRIPT = "s"
_OF_A_STEP_APART = {"outcome"}


def moment(milliseconds: str | float) -> datetime:
    """Return Redis's time in milliseconds as UTC."""
    return datetime.fromtimestamp(int(milliseconds) / 1000, UTC)


def milliseconds(at: datetime) -> int:
    """Return a time as Redis's time in whole milliseconds, cut as the scripts cut it.

    Rounded up, a time that was read before a script would be later than what that script stores.
    """
    return (at - EPOCH) // timedelta(milliseconds=1)


def in_milliseconds(at: datetime) -> datetime:
    """Return a time with the precision of stored ones."""
    return moment(milliseconds(at))


def duration(seconds: float) -> int:
    """Return a duration as scripts take it: whole milliseconds, at least 0."""
    return max(round(seconds * 1000), 0)


def pairs(flat: Any) -> Fields:
    """Return the fields of a reply as a dict; a Lua script returns them as a flat list."""
    return dict(flat) if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))


def slim(state: AgentState, *, ended: bool = False) -> str:
    """Return the hand-off form of a state: all counters, no messages.

    Scripts look into that of a run which goes on; that of one which has `ended` is packed.
    """
    return packed(handoff(state)) if ended else handoff(state)


def check_version(header: Mapping[str, str]) -> bool:
    """Return whether the run's records are of an older version; then its first writer notes ours.

    Raises `SerializationError` for a run written by a newer or a far older version.
    """
    version = int(header.get("v", "0"))
    if version not in READABLE_VERSIONS:
        msg = (
            f"the run's records have version {version}; this version reads "
            f"{SCHEMA_VERSION - 1} and {SCHEMA_VERSION}: upgrade this worker or client"
        )
        raise SerializationError(msg)
    return version < SCHEMA_VERSION


def stored_step(logged: LoggedStep) -> str:
    """Return a log field. Its outcome stands apart: claims read the log, and never outcomes."""
    return packed(logged.json_without(_OF_A_STEP_APART))


def stored_agent(agent: RunAgent) -> Fields:
    """Return the header's fields that say which agent has the run."""
    overrides = exact_json.text(agent.overrides) if agent.overrides else ""
    return {"agent": agent.name, "config": agent.config, "overrides": overrides}


def stored_model(digest: str, model: str) -> str:
    """Return the model that an agent calls first as the header has it: for that configuration."""
    return f"{digest} {bare_name(model)}"


def stored_outage(outage: Outage) -> str:
    """Return services that are out, as a commit takes them."""
    known = {"since": round(outage.since.timestamp() * 1000), "circuits": outage.circuits}
    return orjson.dumps(known).decode()


WAIT = ("wait", "v", "step", "updated", "not_before", "waiting", "outage", "parked")
"""The fields of a header that `load_wait` reads; those of version 2 have no `wait`."""
_FOR_RUNS = 32503680000000


def load_wait(header: Mapping[str, str | None]) -> StepWait | None:
    """Return why the open step of a run does not go on; None for no reason."""
    if text := header.get("wait"):
        stored = orjson.loads(text)
    elif header.get("v") != "2" or not (stored := _earlier_wait(header)):
        return None
    out = stored.get("outage")
    deadline = stored.get("deadline")
    return StepWait(
        reason=WaitReason(stored["reason"]),
        since=moment(stored["since"]),
        deadline=moment(deadline) if deadline else None,
        key=stored.get("key", ""),
        calls=tuple(Wait(*call[:3]) for call in stored.get("calls", ())),
        outage=out and _outage_in(out),
        over=stored.get("over", False),
    )


def _outage_in(stored: Mapping[str, Any]) -> Outage:
    probes = stored.get("probes", False)
    return Outage(moment(stored["since"]), tuple(stored["circuits"]), probes=probes)


def awaited_calls(header: Mapping[str, str | None]) -> tuple[Wait, ...]:
    """Return the calls of the open step that have no result yet, as the run waits for them."""
    wait = load_wait(header)
    return wait.calls if wait else ()


def _earlier_wait(header: Mapping[str, str | None]) -> dict[str, Any] | None:
    """Return the wait of a run of version 2, as wait.lua makes it."""
    deadline, parked = int(header.get("not_before") or 0), header.get("parked")
    step, *listed = (header.get("waiting") or "").split() or [""]
    places = (call.split(":", 2) for call in listed if step == header.get("step"))
    calls = [(int(index), queue, tool) for index, queue, tool in places]
    since, state, *circuits = (header.get("outage") or "0 -").split()
    outage = {"since": int(since), "circuits": circuits, "probes": state == "probes"}
    if not (deadline or calls or circuits):
        return None
    by_reason = {
        WaitReason.RUNS: deadline == _FOR_RUNS,
        WaitReason.CALLS: calls,
        WaitReason.SERVICE: circuits,
        WaitReason.LIMIT: parked,
        WaitReason.DELAY: True,
    }
    return {
        "reason": next(reason for reason, holds in by_reason.items() if holds),
        "since": int(parked or header.get("updated") or 0),
        "deadline": deadline if deadline != _FOR_RUNS else None,
        "calls": calls,
        "outage": outage if circuits else None,
        "over": not deadline,
    }


def stored_loss(lost: LostAttempt | None) -> str:
    """Return an entry of the ledger of lost attempts as it is stored; '' for none."""
    return lost.to_json() if lost else ""


def stored_losses(lost: Iterable[LostAttempt], entered: int = 0) -> str:
    """Return entries of the ledger of lost attempts as scripts take several."""
    texts = [one.to_json() for one in lost]  # JSON escapes the separator
    return "\x1e".join([str(entered), *texts] if entered and texts else texts)


def stored_guesses(guesses: Iterable[Spent]) -> str:
    """Return prices, by model, as scripts add them to entries of lost attempts that have none."""
    texts = []
    for one in guesses:
        fields = {"tokens": one.tokens, "cost_usd": one.cost_usd, "estimated": one.estimated}
        usage = one.usage.model_dump(exclude_defaults=True) if one.usage else {}
        text = exact_json.text({**fields, "model": one.model, "usage": usage})
        texts.append((one.model, text))
    return exact_json.text(texts)


def stored_outcome(outcome: ContinuationOutcome | None) -> str:
    """Return an outcome as it is stored; '' for none."""
    return packed(outcome.to_json()) if outcome else ""


def log_end(window: Window | None) -> str:
    """Return the part of the log that a claim reads, as the scripts take it; '' for all of it.

    The log from the window's beginning on, and from before it: the first input, which may hold
    instructions, the task, and the step with the summary.
    """
    if window is None or window.since == 0:
        return ""
    names = [str(window.since), "input:0"]
    if window.task:
        names.append(f"input:{window.task}")
    if window.summary is not None and window.summary < window.since:
        names.append(str(window.summary))
    return " ".join(names)


def log_begin(header: Fields) -> int:
    """Return the first step that a claim with this header has read (see `log_end`)."""
    return int((header.get("since") or "0").partition(" ")[0])


class _Translation:
    """Raises `SerializationError` for errors of some kinds; a generator would take four times."""

    def __init__(self, what: str, *kinds: type[Exception], longest: int | None = None) -> None:
        self._what, self._kinds, self._longest = what, kinds, longest

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, self._kinds):
            raise SerializationError(f"{self._what}: {str(error)[: self._longest]}") from error


writing = _Translation(
    "a record of the step cannot be stored", ValueError, TypeError, RecursionError, longest=300
)
"""For values that cannot be stored, whoever has let them through."""
reading = _Translation("a record of the run cannot be read", ValueError, KeyError)


def load_log(fields: Fields, outcomes: Fields | None = None, first: int = 0) -> list[LoggedStep]:
    """Return the committed steps from `first` on, with their outcomes where those were read too.

    Raises `SerializationError` when a record cannot be read.
    """
    with reading:
        log = [LoggedStep.from_json(step) for step in _steps(fields, first)]
        return [_with_outcome(step, outcomes) for step in log] if outcomes else log


def load_results(fields: Fields, first: int = 0) -> list[LoggedResult]:
    """Return the same steps without their messages, as results of runs have them.

    Raises `SerializationError` when a record cannot be read.
    """
    with reading:
        return [LoggedResult.from_json(step) for step in _steps(fields, first)]


def _steps(fields: Fields, first: int) -> list[bytes]:
    return [unpacked(one) for one in stored_steps(fields, first)]


def stored_steps(fields: Fields, first: int) -> list[str]:
    """Return the log's fields of the steps from `first` on, in their order."""
    numbers = sorted(int(name) for name in fields if name.isdigit())
    return [fields[str(number)] for number in numbers if number >= first]


def load_errors(header: Fields, fields: Fields) -> tuple[int, list[LoggedErrors]]:
    """Return the number of a run's newest execution, and the errors of all its steps.

    Raises `SerializationError` when a record cannot be read.
    """
    with reading:
        execution = HandOff.from_json(unpacked(header["slim"])).info.execution
        return execution, [LoggedErrors.from_json(step) for step in _steps(fields, 0)]


def load_used(header: Fields) -> Used:
    """Return what a run's newest execution has used. Raises `SerializationError`."""
    with reading:
        used = Used.from_json(unpacked(header["slim"]))
        return used.model_copy(update={"lost": load_lost_use(header)[0]})


def load_lost_use(header: Fields) -> tuple[LostUse, LostUse]:
    """Return what attempts that were not committed have cost: of the execution, and of the run.

    The scripts note it in the header, with what it was when the execution began.
    """
    if not header.get("vain"):
        return _NOTHING_LOST, _NOTHING_LOST
    whole, before = (_lost_use(header.get(name)) for name in ("vain", "vain_before"))
    return whole - before, whole


def _lost_use(text: str | None) -> LostUse:
    if not text:
        return LostUse()
    calls, tokens, nano = map(int, text.split())
    return LostUse.model_construct(calls=calls, tokens=tokens, cost_usd=nano / NANO)


def load_outcome(stored: str | None) -> ContinuationOutcome | None:
    """Return a stored outcome, if there is one. Raises `SerializationError`."""
    if not stored:
        return None
    with reading:
        return ContinuationOutcome.from_json(unpacked(stored))


def _with_outcome(step: LoggedStep, outcomes: Fields) -> LoggedStep:
    outcome = load_outcome(outcomes.get(str(step.result.step - 1)))
    return step.model_copy(update={"outcome": outcome})


def load_messages(
    system: str, fields: Fields, said: Sequence[Messages], first: int = 0
) -> Messages:
    """Return the conversation: instructions, then inputs and the messages of steps, in their order.

    Where the log was read from a later step on, the earlier inputs among its fields come first.
    Raises `SerializationError` when a record cannot be read.
    """
    messages = [Message.system(system)] if system else []
    with reading:
        for number in _earlier_inputs(fields, first):
            messages.extend(MESSAGES.validate_json(fields[f"input:{number}"]))
        for number in range(len(said) + 1):
            given = fields.get(f"input:{first + number}")
            if given:
                messages.extend(MESSAGES.validate_json(given))
            if number < len(said):
                messages.extend(said[number])
    return tuple(messages)


def load_history(
    fields: Fields, said: Sequence[Messages], system: str, window: Window | None, first: int = 0
) -> History:
    """Return the conversation as memory policies see it: step by step.

    Raises `SerializationError` when a record cannot be read.
    """
    with reading:
        inputs = {
            int(name[6:]): MESSAGES.validate_json(given)
            for name, given in fields.items()
            if name.startswith("input:")
        }
        summary = None
        if window and window.summary is not None:
            made = LoggedStep.from_json(unpacked(fields[str(window.summary)]))
            summary = made.remembered.summary if made.remembered else None
    instructions = tuple(one for one in inputs.get(0, ()) if one.is_system())
    if instructions:
        inputs[0] = tuple(one for one in inputs[0] if not one.is_system())
    parts = tuple(
        Part(inputs.get(first + place, ()), messages) for place, messages in enumerate([*said, ()])
    )
    return History(
        parts=parts,
        system=((Message.system(system),) if system else ()) + instructions,
        first=first,
        earlier={number: given for number, given in inputs.items() if number < first},
        summary=summary,
    )


def _earlier_inputs(fields: Fields, first: int) -> list[int]:
    if not first:
        return []
    numbers = (int(name[6:]) for name in fields if name.startswith("input:"))
    return sorted(number for number in numbers if number < first)


def load_state(header: Fields, messages: Messages, calls: ToolResults, now: datetime) -> AgentState:
    """Return the run's state at `now`, with its conversation and its tool calls.

    Raises `SerializationError` when a record cannot be read.
    """
    check_version(header)
    with reading:
        state = AgentState.from_json(unpacked(header["slim"]))
        started = header.get("execution_started")
        info = state.info.model_copy(
            update={
                "started_at": moment(header["created"]),
                "updated_at": now,
                "execution_started_at": moment(started) if started else None,
            }
        )
        note = header.get("want_note")
        lost, session_lost = load_lost_use(header)
        update: dict[str, Any] = {
            "info": info,
            "status": Lifecycle(header["status"]),
            "messages": messages,
            "tool_results": calls,
            "lost": lost,
            "session_lost": session_lost,
            "stop_requested": note if header.get("want") == Want.CANCEL else None,
        }
        return state.model_copy(update=update)


def load_end(header: Fields) -> EndState:
    """Return what a result has of an ended run's state. Raises `SerializationError`."""
    check_version(header)
    with reading:
        state = EndState.from_json(unpacked(header["slim"]))
    outcome = load_outcome(header.get("outcome"))
    return state.model_copy(update={"last_continuation_outcome": outcome}) if outcome else state


def load_journal(fields: Fields) -> Journal:
    """Return the journal of the open step. Raises `SerializationError`."""
    if not fields:
        return _NOTHING_JOURNALED
    response, memory = fields.get("response"), fields.get("memory")
    try:
        return Journal(
            response=LLMResponse.from_json(response) if response else None,
            remembered=Remembered.from_json(memory) if memory else None,
            started=frozenset(int(name[2:]) for name in fields if name.startswith("s:")),
            results={
                int(name[2:]): ToolCallRecord.from_json(value)
                for name, value in fields.items()
                if name.startswith("r:")
            },
            answers={
                int(name[2:]): Answer.from_json(value)
                for name, value in fields.items()
                if name.startswith("a:")
            },
            spent=int(fields.get("spent", "0")) / 1000,
            began=moment(fields["began"]) if "began" in fields else None,
        )
    except ValidationError as error:
        msg = f"the journal of the run's open step cannot be read: {error}"
        raise SerializationError(msg) from error


def load_lost(fields: Fields) -> tuple[LostAttempt, ...]:
    """Return the ledger of attempts that were not committed, in the order of their times."""
    found = (LostAttempt.from_json(value) for value in fields.values())
    return tuple(sorted(found, key=lambda one: one.at_ms))


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
