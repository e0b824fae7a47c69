"""Runs as their callers read them: from anywhere, while they run and after."""

import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from stepfleet.orchestrator.agents.config import AgentConfig, read_overrides
from stepfleet.orchestrator.errors import ConflictError, NotFoundError, SerializationError
from stepfleet.orchestrator.events.envelope import numbered
from stepfleet.orchestrator.protocol.revision import agent_before, overrides_of
from stepfleet.orchestrator.protocol.serialization import SlimSerializationConfig, SlimSerializer
from stepfleet.orchestrator.protocol.verdict import LONGEST
from stepfleet.orchestrator.protocol.waiting import StepWait, WaitReason
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run.facts import (
    FailedRun,
    LastError,
    RunOrigin,
    cause_of_end,
    explains,
    last_error,
)
from stepfleet.orchestrator.records.run.results import (
    AgentRunResult,
    LostAttempt,
    RunStatus,
    run_status,
)
from stepfleet.orchestrator.records.state import NOT_COMPLETED, AgentState, EndState, Lifecycle
from stepfleet.orchestrator.records.steps import (
    LoggedResult,
    LoggedStep,
    RunAgent,
    StepResult,
    by_agents,
)
from stepfleet.orchestrator.store.codec import (
    MESSAGES,
    Fields,
    check_version,
    in_milliseconds,
    load_errors,
    load_events,
    load_log,
    load_lost,
    load_messages,
    load_outcome,
    load_state,
    load_used,
    log_begin,
    moment,
    stored_agent,
)
from stepfleet.orchestrator.store.gateway import Gateway, Opened

STEPS = 500
"""Steps of many runs' logs that are in memory at once, unless one run has more."""
Found = tuple[str, Fields]
"""A run's id and fields of its header."""
_WITHOUT_ERROR = frozenset({None, RunStatus.COMPLETED})
_RETRY_FIELDS = (
    *("v", "agent", "config", "overrides", "slim", "since", "created", "updated"),
    *("execution_started", "status", "step", "seq", "want", "want_note", "vain", "vain_before"),
    *("tenant", "batch", "billed"),  # who pays: what a step has cost is taken back from them
)
log = logging.getLogger(__name__)
_FAILED_FIELDS = (
    *("v", "agent", "config", "overrides", "slim", "vain", "vain_before"),
    *("status", "step", "stop_reason", "error", "line", "tenant"),
)
_LIMITS = {
    StopReason.STEPS_LIMIT: ("max_steps",),
    StopReason.TOKEN_LIMIT: ("token_limit",),
    StopReason.TIME_LIMIT: ("time_limit", "cumulative_timeout"),
    StopReason.GUARD: ("budget_usd",),
}
_MOST_SHARED = 1_000
_MESSAGES_PER_STEP = 2
"""In most steps: an answer with a call, and its result."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run, read in one round trip."""

    run_id: str
    agent: str
    step: int
    header: Fields
    state: AgentState
    config: AgentConfig
    log: tuple[LoggedStep, ...]
    lost: tuple[LostAttempt, ...]
    fields: Fields = field(default_factory=dict)
    """The log as it is stored: steps and inputs by their numbers."""
    first: int = 0
    """The step at which the log begins; earlier steps were trimmed by the run's memory."""

    @property
    def overrides(self) -> dict[str, Any]:
        """The run's own changes to its agent's configuration."""
        stored = self.header.get("overrides")
        return dict(exact_json.loads(stored)) if stored else {}

    def result(self) -> AgentRunResult:
        """Return the run's result, as far as it has come."""
        return result_of(self.run_id, self.header, self.config, self.state, self.log, self.lost)


def result_of(
    run_id: str,
    header: Fields,
    config: AgentConfig,
    state: AgentState | EndState,
    log: Sequence[LoggedStep | LoggedResult],
    lost: tuple[LostAttempt, ...],
) -> AgentRunResult:
    """Return the result of a run, as far as it has come. Pure."""
    steps, handoffs = by_agents(log)
    reason = StopReason(header["stop_reason"]) if header.get("stop_reason") else None
    status = run_status(reason) if reason else None
    last = None
    if status not in _WITHOUT_ERROR:
        execution = state.info.execution
        newest = [logged.result for logged in log if logged.execution == execution]
        last = last_error(newest, open_attempts(header, lost))
    ended = header.get("ended")
    return AgentRunResult(
        run_id=run_id,
        agent_name=header["agent"],
        model=config.model,
        lifecycle=Lifecycle(header["status"]),
        stop_reason=reason,
        status=status,
        output=state.last_output,
        structured=state.answer.structured if state.answer else None,
        schema_name=state.answer.schema_name if state.answer else None,
        steps=steps,
        handoffs=handoffs,
        usage=state.session_usage,
        cost_usd=state.session_cost_usd,
        below_usage=state.session_below_usage,
        below_cost_usd=state.session_below_cost_usd,
        cumulative_execution_seconds=state.info.cumulative_execution_seconds,
        start_time=moment(header.get("execution_started") or header["created"]),
        end_time=moment(ended) if ended else None,
        error=header.get("error") or None,
        last_error=last,
        max_iterations=config.max_steps,
        batch_id=header.get("batch") or None,
        line_id=header.get("line") or None,
        row=int(header["row"]) if header.get("row") else None,
        parent_agent_id=state.parent_agent_id,
        origin=RunOrigin.from_json(header["origin"]) if header.get("origin") else None,
        metadata=state.metadata,
        tenant=header.get("tenant"),
        outcome=state.last_continuation_outcome,
        lost_attempts=lost,
        price_estimated=header.get("guessed") == "1",
    )


def next_attempt(
    wait: StepWait | None, lost: Iterable[tuple[datetime | None, str | None]], now: datetime
) -> str:
    """Return when and why a step that could not be done for now is tried again; else ''.

    It failed, or a worker could not read the run.
    `lost` are the times and reasons of attempts.
    """
    if wait is None or wait.over or wait.reason is not WaitReason.DELAY:
        return ""
    since, until = wait.since, wait.deadline or wait.since
    if wait.key:
        return f"a worker that can read it, tried at {until:%H:%M:%S} UTC ({wait.key})"
    reasons = [why for at, why in lost if at == since and why]
    if not reasons or until <= now:
        return ""
    asked = (until - since).total_seconds() > LONGEST  # no wait of our own is so long
    why = "as the provider asked" if asked else "behind a failure"
    return f"its next attempt at {until:%H:%M:%S} UTC, {why} ({reasons[-1]})"


def open_attempts(header: Fields, lost: Iterable[LostAttempt]) -> list[LostAttempt]:
    """Return the attempts at the step that a run could not make in its time."""
    in_time = header.get("stop_reason") != StopReason.TIME_LIMIT
    return [] if in_time else [one for one in lost if one.step > steps_of(header)]


@dataclass(frozen=True, slots=True)
class _Tail:
    """The newest part of a run: its steps from `first` on, and the messages from there."""

    first: int
    log: list[LoggedStep]
    messages: tuple[Message, ...]


class RunReader(Gateway):
    """Reads runs, their events and snapshots; many ended ones at once, and why some failed."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._shared: dict[tuple[str, str], AgentConfig] = {}

    async def get(self, run_id: str) -> StoredRun:
        """Return a run.

        Raises `NotFoundError` if there is none of that id, `SerializationError` if this
        version cannot read it.
        """
        run_key = self._keys.run(run_id)
        header, fields, outcomes, lost = await self._reads.execute_all(
            *(("HGETALL", f"{run_key}{part}") for part in ("", ":log", ":outcomes", ":lost"))
        )
        if not header:
            raise unknown_run(run_id)
        check_version(header)
        config = await self._configs.of_run(header)
        whole = sum(name.isdigit() for name in fields) >= int(header["step"])
        first = 0 if whole else log_begin(header)
        log = load_log(fields, outcomes, first)
        now = moment(header["updated"])
        messages = load_messages(
            config.instructions, fields, [step.messages for step in log], first
        )
        calls = tuple(call for step in log for call in step.result.tool_calls)
        state = load_state(header, messages, calls, now)
        if outcome := load_outcome(header.get("outcome")):
            state = state.with_continuation_outcome(outcome)
        return StoredRun(
            run_id=run_id,
            agent=header["agent"],
            step=int(header["step"]),
            header=header,
            state=state,
            config=config,
            log=tuple(log),
            lost=load_lost(lost),
            fields=fields,
            first=first,
        )

    async def step(self, run_id: str, number: int) -> StepResult | None:
        """Return one committed step of a run, counted from 1; None if there is no such one."""
        log = f"{self._keys.run(run_id)}:log"
        stored = await self._reads.execute("HGET", log, number - 1)
        return load_log({str(number): stored})[0].priced_result if stored else None

    async def as_before(self, run: StoredRun, step: int) -> StoredRun:
        """Return a run with the agent whose step `step` (from 0) was, and the limits of now.

        Raises `ConfigurationError` where the store has not kept that agent, and no worker has it.
        """
        agent = agent_before(run.log, step)
        if agent is None:
            return run
        try:
            config = await self._configs.load(agent.config)
        except SerializationError:
            config = await self._configs.named(agent.name)
        overrides = overrides_of(agent, run.config)
        then = RunAgent(
            name=agent.name, config=await self._configs.save(config), overrides=overrides
        )
        header = {**run.header, **stored_agent(then)}
        config = config.with_overrides(overrides)
        return replace(run, agent=agent.name, header=header, config=config)

    async def events(self, run_id: str, after: str = "0") -> tuple[list[dict[str, Any]], str]:
        """Return the events after the position `after`, and the position to go on from.

        Each has its `sequence` number, from 1 without gaps, and an `event_id` made of it.
        """
        key = f"{self._keys.run(run_id)}:events"
        entries = await self._reads.execute("XRANGE", key, f"({after}", "+", "COUNT", 500)
        events: list[dict[str, Any]] = []
        for position, fields in entries:
            first = int(fields["first"])
            events += numbered(
                load_events(run_id, fields["events"]),
                first,
                moment(position.partition("-")[0]),
            )
            after = position
        return events, after

    async def now(self) -> datetime:
        """Return Redis's time."""
        return in_milliseconds(await self._connection.read_clock())

    async def headers(
        self, run_ids: Sequence[str], fields: Sequence[str] = _RETRY_FIELDS
    ) -> list[Fields]:
        """Return those fields of headers; {} for a run that is not there."""
        replies = await self._reads.execute_all(
            *(("HMGET", self._keys.run(run_id), *fields) for run_id in run_ids)
        )
        return [
            {name: value for name, value in zip(fields, reply, strict=True) if value is not None}
            for reply in replies
        ]

    async def logs(self, steps: Sequence[tuple[str, int]]) -> list[Fields]:
        """Return the logs of runs with that many steps, by the steps' numbers; no inputs."""
        reads = (
            ("HMGET", f"{self._keys.run(run_id)}:log", *range(count))
            for run_id, count in steps
            if count
        )
        replies = iter(await self._reads.execute_all(*reads))
        return [by_number(next(replies)) if count else {} for _, count in steps]

    async def failed(self, run_ids: Sequence[str]) -> list[FailedRun]:
        """Return the runs that have ended and did not complete, in this order.

        One that this version cannot read is left out, with a warning in the log.
        """
        headers = await self.headers(run_ids, _FAILED_FIELDS)
        pairs = zip(run_ids, headers, strict=True)
        found = [one for one in pairs if one[1].get("status") in NOT_COMPLETED]
        return [run for part in in_parts(found) async for run in self._failed_part(part)]

    async def _failed_part(self, part: Sequence[Found]) -> AsyncIterator[FailedRun]:
        logs = await self.logs([(one, steps_of(header)) for one, header in part])
        losses = await self._lost(part)
        for (run_id, header), fields in zip(part, logs, strict=True):
            try:
                check_version(header)
                last = _newest_error(header, fields, losses.get(run_id, {}))
                yield failed_run(run_id, header, await self._shared_config(header), last)
            except SerializationError as error:
                log.warning("run %s is left out of the failures: %s", run_id, error)

    async def _lost(self, part: Sequence[Found]) -> dict[str, Fields]:
        """Return the lost attempts of the runs that ran out of time."""
        late = [one for one, header in part if header["stop_reason"] == StopReason.TIME_LIMIT]
        reads = (("HGETALL", f"{self._keys.run(run_id)}:lost") for run_id in late)
        return dict(zip(late, await self._reads.execute_all(*reads), strict=True))

    async def _shared_config(self, header: Fields) -> AgentConfig:
        about = (header["config"], header.get("overrides", ""))
        if about not in self._shared:
            if len(self._shared) >= _MOST_SHARED:
                del self._shared[next(iter(self._shared))]
            self._shared[about] = await self._configs.of_run(header)
        return self._shared[about]

    async def snapshot(self, run_id: str, config: SlimSerializationConfig) -> dict[str, Any]:
        """Return a run's snapshot. Raises `NotFoundError` if there is no run of that id."""
        header = await self._whole_header(run_id)
        state = load_state(header, (), (), moment(header["updated"]))
        if outcome := load_outcome(header.get("outcome")):
            state = state.with_continuation_outcome(outcome)
        tail = await self._tail(run_id, int(header["step"]), config)
        system = await self._system(run_id, header, tail) if config.kept_messages else ()
        whole = state.model_copy(update={"messages": (*system, *tail.messages)})
        return SlimSerializer(config).serialize(whole, [logged.result for logged in tail.log])

    async def standing(self, run_id: str) -> tuple[Lifecycle, int]:
        """Return a run's status and how many steps it has committed.

        Raises `NotFoundError` if there is no run of that id.
        """
        found = await self._reads.execute("HMGET", self._keys.run(run_id), "status", "step")
        if found[0] is None:
            raise unknown_run(run_id)
        return Lifecycle(found[0]), int(found[1])

    async def tenant(self, run_id: str) -> str | None:
        """Return whom a run is for. Raises `NotFoundError` if there is no run of that id."""
        found = await self._reads.execute("HMGET", self._keys.run(run_id), "status", "tenant")
        if found[0] is None:
            raise unknown_run(run_id)
        return None if found[1] is None else str(found[1])

    async def _whole_header(self, run_id: str) -> Fields:
        header = await self._reads.execute("HGETALL", self._keys.run(run_id))
        if not header:
            raise unknown_run(run_id)
        return dict(header)

    async def _system(self, run_id: str, header: Fields, tail: _Tail) -> tuple[Message, ...]:
        """Return the instructions: the agent's, or where it has none those of the first input."""
        config = await self._configs.load(header["config"])
        own = read_overrides(header.get("overrides"))
        if instructions := str(own.get("instructions", config.instructions)):
            return (Message.system(instructions),)
        if not tail.first:
            return ()
        key = f"{self._keys.run(run_id)}:log"
        given = await self._reads.execute("HGET", key, "input:0")
        return tuple(one for one in MESSAGES.validate_json(given or "[]") if one.is_system())

    async def _tail(self, run_id: str, steps: int, config: SlimSerializationConfig) -> _Tail:
        """Return enough of the log's end, read from the newest entry backwards."""
        key, wanted = f"{self._keys.run(run_id)}:log", config.kept_messages
        fields: Fields = {}
        tail = _Tail(steps, [], ())
        first, length = steps, max(config.kept_steps, _about(wanted))
        names = [f"input:{steps}"] if wanted else []
        while True:
            before, first = first, max(first - length, 0)
            for number in range(first, before):
                names += [str(number), f"input:{number}"] if wanted else [str(number)]
            if names:
                found = await self._reads.execute("HMGET", key, *names)
                fields |= {name: text for name, text in zip(names, found, strict=True) if text}
                log = load_log(fields)
                tail = _Tail(first, log, _messages(fields, log, first))
            if not first or len(tail.messages) >= wanted:
                return tail
            names, length = [], _about(wanted - len(tail.messages))


def unknown_run(run_id: str) -> NotFoundError:
    """Return the error about a run that is not in the store."""
    msg = f"no run has the id {run_id!r}; ended runs are removed after the retention time"
    return NotFoundError(msg)


def archived_run(run_id: str) -> ConflictError:
    """Return the error about a run that is to change, and is in the archive."""
    msg = f"run {run_id} is archived: 'stepfleet archive --restore {run_id}' brings it back"
    return ConflictError(msg)


def archived_batch(batch_id: str) -> ConflictError:
    """Return the error about runs of a batch that are to change, and are in the archive."""
    back = f"'stepfleet archive --restore {batch_id}' brings them back"
    return ConflictError(f"runs of batch {batch_id} are archived: {back}")


def ended_run(run_id: str, header: Fields, log: Fields, config: AgentConfig) -> StoredRun:
    """Return a run without its conversation and its lost attempts. Pure.

    `config` has the run's overrides in it. Raises `SerializationError` as `RunReader.get` does.
    """
    check_version(header)
    step = int(header["step"])
    first = 0 if len(log) >= step else log_begin(header)
    return StoredRun(
        run_id=run_id,
        agent=header["agent"],
        step=step,
        header=header,
        state=load_state(header, (), (), moment(header["updated"])),
        config=config,
        log=tuple(load_log(log, first=first)),
        lost=(),
        first=first,
    )


def steps_of(header: Fields) -> int:
    """Return how many steps a run with that header has committed."""
    return int(header.get("step", "0"))


def in_parts(found: Iterable[Found]) -> Iterator[list[Found]]:
    """Yield runs in parts whose logs have at most `STEPS` steps together, or one run each."""
    part: list[Found] = []
    steps = 0
    for one in found:
        steps += steps_of(one[1])
        if part and steps > STEPS:
            yield part
            part, steps = [], steps_of(one[1])
        part.append(one)
    if part:
        yield part


def by_number(reply: Sequence[str | None]) -> Fields:
    """Return the steps of a log that are there, by their numbers."""
    return {str(number): step for number, step in enumerate(reply) if step is not None}


def failed_run(
    run_id: str, header: Fields, config: AgentConfig, last: LastError | None
) -> FailedRun:
    """Return an ended run as failures are counted. Pure."""
    reason = StopReason(header["stop_reason"])
    error = header.get("error") or ""
    why = explains(reason, last)
    return FailedRun(
        run_id=run_id,
        line_id=header.get("line") or None,
        tenant=header.get("tenant"),
        agent=header["agent"],
        model=config.model,
        stop_reason=reason,
        step=why.step if why else steps_of(header),
        text=why.message if why else error,
        cause=cause_of_end(reason, error, last, config.model),
        limits=_raised(header, config, reason),
    )


def _raised(header: Fields, config: AgentConfig, reason: StopReason) -> dict[str, int | float]:
    """Return limits that a retry has to raise: twice their values, or what was used of them."""
    limits = {name: getattr(config, name) for name in _LIMITS.get(reason, ())}
    set_ones = {name: value for name, value in limits.items() if value is not None}
    if not set_ones:
        return {}
    used = load_used(header)
    return {name: round(2 * max(one, used.of(name)), 6) for name, one in set_ones.items()}


def _newest_error(header: Fields, fields: Fields, lost: Mapping[str, str]) -> LastError | None:
    execution, steps = load_errors(header, fields)
    newest = [step.result for step in steps if step.execution == execution]
    return last_error(newest, open_attempts(header, load_lost(dict(lost))))


def _about(messages: int) -> int:
    """Return how many steps may hold that many messages."""
    return -(-messages // _MESSAGES_PER_STEP)


def _messages(fields: Fields, log: list[LoggedStep], first: int) -> tuple[Message, ...]:
    here = {name: text for name, text in fields.items() if name.startswith("input:")}
    return load_messages("", here, [step.messages for step in log], first)
