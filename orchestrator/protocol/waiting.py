"""A step that waits, without a slot, for tool calls that are tasks of their own. Pure.

Decides which calls of a response are such tasks, how long the run waits for them, and the record of
a call that is unfinished by then. Knows neither the contents of queues nor their workers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from datetime import datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from json import dumps
from typing import Any

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.events.envelope import Event, EventType
from stepfleet.orchestrator.limits.limit import NORMAL
from stepfleet.orchestrator.protocol.attempt import Wait
from stepfleet.orchestrator.protocol.claim import NO_LOSSES, Losses, Outage, Work
from stepfleet.orchestrator.records.calls.answers import Answer, Decision, RunEnd, awaited_by
from stepfleet.orchestrator.records.calls.tools import DENIED, ToolCall, ToolCallRecord, refused
from stepfleet.orchestrator.records.run.results import RunStatus
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.values import value_class

LONGEST_WAIT = timedelta(days=7)
"""How long a run without a wall-clock limit waits for tool calls."""
_SOON = 0.1
NOTHING: frozenset[int] = frozenset()


class WaitReason(StrEnum):
    """What an open step waits for."""

    DELAY = "delay"
    """The time of its next attempt, or of its first."""
    SERVICE = "service"
    """A service that is out."""
    LIMIT = "limit"
    """A limit of the fleet."""
    CALLS = "calls"
    """Tools on other queues, other runs, people."""
    RUNS = "runs"
    """The ends of the runs before it."""
    OTHER = "other"
    """Something that only a newer version knows."""

    @classmethod
    def _missing_(cls, _: object) -> "WaitReason":
        return cls.OTHER


@value_class(frozen=True, slots=True)
class StepWait:
    """Why a run's open step does not go on since `since`.

    What it waits for wakes it; a worker takes it at the `deadline` in any case (UTC; None: only
    those that end before it wake it). `calls` have no result yet, `outage` is of services that are
    out, `key` names a limit, or says which worker could not read the run, and why. Once it is
    `over` a worker has taken the step, which is still open.
    """

    reason: WaitReason
    since: datetime
    deadline: datetime | None = None
    key: str = ""
    calls: tuple[Wait, ...] = ()
    outage: Outage | None = None
    over: bool = False


@value_class(frozen=True, slots=True)
class Waiting:
    """The calls that a step waits for, and for how many seconds at most (`patience`).

    `seconds` is the duration of the attempt that ends here; `began` is when the step began (UTC).
    """

    calls: tuple[Wait, ...]
    patience: float
    seconds: float
    began: datetime


@value_class(frozen=True, slots=True)
class Delivered:
    """Answer to a delivery. `left` counts the calls that the run still waits for."""

    applied: bool
    left: int = 0
    status: str = ""


@value_class(frozen=True, slots=True)
class TakenCall:
    """A tool call that this worker owns until its lease runs out.

    `token` fences every write, `now` is Redis's time. `attempt` counts the starts of this call
    from 1, `losses` are the workers that vanished with it. `custom_state` and `metadata` are
    the run's, for reading; `parent` is the run that it works for.
    """

    hint: Work
    token: str
    now: datetime
    call: ToolCall
    config: AgentConfig
    execution: int
    attempt: int = 1
    losses: Losses = NO_LOSSES
    custom_state: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    batch_id: str | None = None
    line_id: str | None = None
    parent: str | None = None
    tenant: str | None = None
    priority: int = NORMAL
    limited: bool = False
    """Whether its run, or the batch that pays for it, was submitted with a limit of its own."""
    billed: str | None = None
    """The batch that pays for its run where that is of no batch."""
    depth: int = 0
    """How many runs are above its own, each started by a call of the one before."""
    place: str = ""
    """Its queue, or what it waits for (see `Awaited`)."""
    until: datetime | None = None
    """The time limit of a call that no worker makes."""

    @property
    def key(self) -> str:
        """What an answer to this call names, and the id of a run that it starts."""
        return wait_key(self.hint.run_id, self.hint.step, self.index, self.call)

    @property
    def index(self) -> int:
        """The call's index in its response."""
        assert self.hint.index is not None  # noqa: S101 - it names a call
        return self.hint.index

    @property
    def crashes(self) -> int:
        """How many workers have vanished with this call."""
        return self.losses.count


@value_class(frozen=True, slots=True)
class Arrived:
    """The reply to an answer. `left` counts the calls that the run still waits for.

    Where it was not applied, `first` is the answer (JSON) that the call had already, or empty where
    the run has ended or gone on; `status` is the run's.
    """

    applied: bool
    left: int = 0
    status: str = ""
    first: str = ""


def wait_key(run_id: str, step: int, index: int, call: ToolCall) -> str:
    """Return what an answer to a call names: another call at its place has another key.

    It is the id of the run that the call starts, so that starting it twice makes one run.
    """
    made = dumps([run_id, step, index, call.id, call.name, call.arguments], sort_keys=True)
    return f"{run_id}.{sha256(made.encode()).hexdigest()[:10]}"


def root_of(run_id: str) -> str:
    """Return the run that was submitted, of one that a call of it, or of one below, has started."""
    return run_id.partition(".")[0]


def is_child(run_id: str, parent: str | None) -> bool:
    """Return whether a call of the run `parent` has started a run."""
    return parent is not None and run_id.startswith(f"{parent}.")


def divided(
    open_calls: Sequence[int],
    calls: Sequence[ToolCall],
    places: Mapping[int, str],
    *,
    parallel: bool,
) -> tuple[list[int], tuple[Wait, ...]]:
    """Return the calls that run now, in the step, and those that the step waits for after them.

    `places` has the queues of calls, or what they wait for, by their indexes. In parallel: all
    other calls run, and the step waits for these together. In order: the other calls up to the
    first one of these run, and the step waits for that one; the others follow.
    """
    waits = [
        Wait(index, places[index], calls[index].name)
        for index in open_calls
        if index in places and calls[index].error is None
    ]
    if not parallel:
        waits = waits[:1]
        end = open_calls.index(waits[0].index) if waits else len(open_calls)
        return list(open_calls[:end]), tuple(waits)
    heavy = {wait.index for wait in waits}
    return [index for index in open_calls if index not in heavy], tuple(waits)


def queues_of(calls: Iterable[Wait], steps: str) -> set[str]:
    """Return the queues of calls that a run waits for; `steps` is that of steps.

    It serves calls that wait for other runs, too. Those that wait for people need no worker.
    """
    waits = ((one.queue, awaited_by(one.queue)) for one in calls)
    return {steps if by else queue for queue, by in waits if not (by and by.by_people)}


def patience(config: AgentConfig, state: AgentState, now: datetime) -> float:
    """Return for how many seconds a run waits: until its wall-clock limit, a week at most.

    A cumulative timeout counts workers' time, and so sets no end to waiting.
    """
    started = state.info.execution_started_at
    if config.cumulative_timeout is not None or config.time_limit is None or started is None:
        return LONGEST_WAIT.total_seconds()
    left = (started + timedelta(seconds=config.time_limit) - now).total_seconds()
    return min(max(left, 0.0), LONGEST_WAIT.total_seconds())


def within_time(delay: float, config: AgentConfig, state: AgentState, now: datetime) -> float:
    """Return the wait of a step: until the run's wall-clock limit ends it at most.

    The limit counts whole seconds. The wait is never 0: nobody sends a step that is to be repeated
    at once.
    """
    left = patience(config, state, now)
    if config.time_limit is not None:
        left += math.ceil(config.time_limit) - config.time_limit
    return min(delay, max(left, _SOON))


RUN_FAILED = "RUN_FAILED"


def answered(call: ToolCall, answer: Answer, at: datetime) -> ToolCallRecord | None:
    """Return the record of a call with that answer; None where the call may be made now."""
    if answer.run is not None:
        return _of_run(call, answer.run, at)
    if answer.decision is not None:
        return _of_decision(call, answer.decision, at)
    return None


def decided_event(
    hint: Work, execution: int, call: ToolCall, decision: Decision, at: datetime
) -> Event:
    """Return the event of a call's decision."""
    payload = {
        "step_number": hint.step + 1,
        "tool_name": call.name,
        "tool_call_id": call.id,
        "approved": decision.approved,
        "by": decision.by,
        "reason": decision.reason,
        "by_default": decision.by_default,
    }
    return Event(EventType.DECIDED, hint.run_id, f"{hint.run_id}:{execution}", at, payload)


def _of_run(call: ToolCall, end: RunEnd, at: datetime) -> ToolCallRecord:
    bare = end.model_copy(update={"output": None})
    if end.status != RunStatus.COMPLETED:
        why = f": {end.error}" if end.error else ""
        started = f"run {end.run_id} of agent {end.agent!r} ended as {end.stop_reason}{why}"
        message = started if end.run_id else f"no run of agent {end.agent!r} was started{why}"
        record = refused(call, at, code=RUN_FAILED, message=message)
        return record.model_copy(update={"run": bare}) if end.run_id else record
    text = end.output or ""
    if end.cut:
        text += f"\n[{end.cut:,} more characters: see run {end.run_id}]"
    return _result(call, text, at).model_copy(update={"run": bare})


def _of_decision(call: ToolCall, decision: Decision, at: datetime) -> ToolCallRecord | None:
    if not decision.approved:
        by = decision.by or "the time limit"
        reason = f": {decision.reason}" if decision.reason else ""
        record = refused(call, at, code=DENIED, message=f"denied by {by}{reason}")
    elif decision.text is not None:
        record = _result(call, decision.text, at)
    else:
        return None
    return record.model_copy(update={"decision": decision})


def _result(call: ToolCall, text: str, at: datetime) -> ToolCallRecord:
    return ToolCallRecord(
        tool_name=call.name,
        call_id=call.id,
        arguments=call.arguments,
        result=text,
        duration_ms=0.0,
        timestamp=at,
    )
