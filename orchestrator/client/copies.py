"""What is made of a run's past: checkpoints, and runs to create of them, or of a fork. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from stepfleet.orchestrator.agents.agent import criteria_without_code
from stepfleet.orchestrator.agents.config import NOT_PER_RUN, AgentConfig, ToolRef
from stepfleet.orchestrator.batches.files.lines import parse_tenant
from stepfleet.orchestrator.client.checkpoints import (
    AgentCheckpoint,
    CheckpointEnding,
    CheckpointStep,
)
from stepfleet.orchestrator.client.control import ensure_resumable
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.pricing.ledger import ModelCall, statistics_of
from stepfleet.orchestrator.protocol.revision import renamed, state_before
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.responses import ModelSettings
from stepfleet.orchestrator.records.run.facts import OriginKind, RunOrigin
from stepfleet.orchestrator.records.state import AgentState, Lifecycle
from stepfleet.orchestrator.records.steps import LoggedStep, StepResult
from stepfleet.orchestrator.records.usage import (
    LostUse,
    UsageStats,
)
from stepfleet.orchestrator.store.codec import (
    MESSAGES,
    in_milliseconds,
    milliseconds,
    moment,
    stored_outcome,
    stored_step,
)
from stepfleet.orchestrator.store.runs.reading import StoredRun
from stepfleet.orchestrator.store.runs.submission import ImportedRun, NewRun

AGENTS_OWN = ("base_url", "api_key_env", "organization", "extra_body")
"""Settings of a model's address and credentials: code, and never in a checkpoint."""
_CHECKED = ("name", "tools")
_HAD_ITS_ANSWER = (StopReason.COMPLETED, StopReason.FINISH_REASON)


def capture(run: StoredRun, now: datetime, at: int | None = None) -> AgentCheckpoint:
    """Return the checkpoint of a run at `now`, or as it was after its first `at` steps.

    It shares its records with `run`. Raises `ConfigurationError` where it has fewer.
    """
    count = checked_at(run, at)
    log = run.log[:count]
    state = run.state if count == len(run.log) else state_before(run.state, run.log, count)
    given = [given_before(run, number) for number in range(count + 1)]
    instructions = [Message.system(run.config.instructions)] if run.config.instructions else []
    calls = tuple(cost_calls(run.config, [logged.result for logged in log]))
    return AgentCheckpoint(
        timestamp=now,
        run_id=run.run_id,
        config=_portable(run.config),
        conversation_history=(
            *instructions,
            *(
                one
                for number, logged in enumerate(log)
                for one in (*given[number], *logged.messages)
            ),
            *given[count],
        ),
        state=_bare(state, log),
        tool_traces=tuple(call for logged in log for call in logged.result.tool_calls),
        last_result=state.last_result,
        last_error=state.last_error,
        last_output=state.last_output,
        cost_calls=calls,
        cost_statistics=statistics_of(calls),
        metadata=state.metadata,
        steps=tuple(_step(logged, given[number]) for number, logged in enumerate(log)),
        instructed=len(instructions),
        given=len(given[count]),
        ending=_ending(run) if count == len(run.log) else None,
        origin=run.result().origin,
        tenant=run.header.get("tenant"),
        lost_attempts=tuple(one for one in run.lost if one.step <= count + 1),
    )


def checked_at(run: StoredRun, at: int | None) -> int:
    """Return how many steps are meant; all of them for None. Raises `ConfigurationError`."""
    if run.first:
        msg = (
            f"run {run.run_id} has forgotten its first {run.first} steps (memory.trim_log), and "
            "cannot be forked or checkpointed; leave trim_log out for runs to fork"
        )
        raise ConfigurationError(msg)
    if "after" in run.header:
        msg = (
            f"run {run.run_id} has not begun: its input will be made of the results of others; "
            "fork or checkpoint it when it has, or submit another run with the same 'after'"
        )
        raise ConfigurationError(msg)
    count = len(run.log) if at is None else at
    if not 0 <= count <= len(run.log):
        msg = f"field 'at' is {at}; run {run.run_id} has {len(run.log)} steps: 0 to {len(run.log)}"
        raise ConfigurationError(msg)
    return count


def given_before(run: StoredRun, step: int) -> tuple[Message, ...]:
    """Return the messages that the run was given before its step `step` (from 0)."""
    stored = run.fields.get(f"input:{step}")
    return MESSAGES.validate_json(stored) if stored else ()


def cost_calls(config: AgentConfig, steps: Sequence[StepResult]) -> Iterator[ModelCall]:
    """Yield the model call of each step as it was priced when it was made."""
    for step in steps:
        usage = step.usage or UsageStats()
        if usage.llm_calls:
            yield ModelCall(
                model_id=step.model or config.model,
                input_tokens=usage.prompt_tokens,
                output_tokens=usage.completion_tokens,
                cost=step.cost_usd,
                timestamp=step.started_at,
            )


def _portable(config: AgentConfig) -> AgentConfig:
    """Return the configuration without the settings of the agent's code."""
    plain = {
        name: ModelSettings.model_fields[name].get_default(call_default_factory=True)
        for name in AGENTS_OWN
    }
    return config.model_copy(update={"settings": config.settings.model_copy(update=plain)})


def _bare(state: AgentState, log: Sequence[LoggedStep]) -> AgentState:
    """Return the state at a step's boundary, without the parts that a checkpoint has elsewhere.

    The clock of the execution starts anew where a run goes on; stamps are in milliseconds. An
    active run changed with its last step.
    """
    update: dict[str, Any] = {"updated_at": in_milliseconds(state.info.updated_at)}
    status = state.status
    if not status.is_terminal:
        update["execution_started_at"] = None
        if status not in (Lifecycle.QUEUED, Lifecycle.PAUSED):
            status = Lifecycle.IN_PROGRESS
            if log:
                last = log[-1].committed_at or log[-1].result.started_at
                update["updated_at"] = in_milliseconds(last)
    return state.model_copy(
        update={
            "info": state.info.model_copy(update=update),
            "status": status,
            "messages": (),
            "tool_results": (),
            "metadata": {},
            "stop_requested": None,
            "lost": LostUse(),  # of the attempts that the checkpoint lists
            "session_lost": LostUse(),
            "last_result": None,
            "last_error": None,
            "last_output": None,
        }
    )


def _step(logged: LoggedStep, given: Sequence[Message]) -> CheckpointStep:
    result = logged.result.model_copy(update={"tool_calls": ()})
    return CheckpointStep(
        given=len(given),
        messages=len(logged.messages),
        tool_calls=len(logged.result.tool_calls),
        logged=logged.model_copy(update={"result": result, "messages": ()}),
    )


def _ending(run: StoredRun) -> CheckpointEnding | None:
    header = run.header
    if not run.state.status.is_terminal:
        return None
    return CheckpointEnding(
        stop_reason=StopReason(header["stop_reason"]),
        error=header.get("error") or None,
        ended_at=moment(header["ended"]),
    )


def of_agent(config: AgentConfig, known: AgentConfig) -> AgentConfig:
    """Return a checkpoint's configuration with the fields of the agent's code from `known`.

    Raises `ConfigurationError` where the agent has not the tools that the run had.
    """
    there = {tool.name for tool in known.tools}
    missing = [tool.name for tool in config.tools if tool.name not in there]
    if missing:
        msg = (
            f"agent {known.name!r} has no tool {missing[0]!r}, which the checkpoint's run had; "
            "deploy it again, or restore with the agent that continues"
        )
        raise ConfigurationError(msg)
    own: dict[str, Any] = {}
    for name in NOT_PER_RUN:
        whole, _, part = name.partition(".")
        if name in _CHECKED:
            continue
        if part:
            fields = own.get(whole) or getattr(config, whole).model_dump()
            own[whole] = {**fields, part: getattr(getattr(known, whole), part)}
        else:
            own[whole] = getattr(known, whole)
    return AgentConfig.model_validate({**config.model_dump(), **own})


def restored(
    checkpoint: AgentCheckpoint,
    config: AgentConfig,
    run_id: str,
    overrides: Mapping[str, Any] | None = None,
) -> ImportedRun:
    """Return the run to create: its log and prices as recorded, nothing pruned or priced anew."""
    same = run_id == checkpoint.run_id
    state = checkpoint.full_state
    state = state if same else renamed(state, run_id)
    log, outcomes = _fields(checkpoint)
    changed = config.with_overrides(overrides or {})
    return ImportedRun(
        run=NewRun(
            run_id=run_id,
            agent=config.name,
            config=config.digest,
            messages=(),
            max_steps=changed.max_steps,
            model=changed.model,
            overrides=dict(overrides or {}),
            metadata=checkpoint.metadata,
            tenant=parse_tenant(checkpoint.tenant),
            parent=state.parent_agent_id,
            origin=checkpoint.origin if same else _origin(checkpoint),
        ),
        state=state,
        step=len(checkpoint.steps),
        log=log,
        outcomes=outcomes,
        lost={
            f"kept:{number}": one.to_json() for number, one in enumerate(checkpoint.lost_attempts)
        },
        header=_header(checkpoint, state),
    )


def _fields(checkpoint: AgentCheckpoint) -> tuple[dict[str, str], dict[str, str]]:
    log: dict[str, str] = {}
    outcomes: dict[str, str] = {}
    for number, (given, logged) in enumerate(checkpoint.log()):
        if given:
            log[f"input:{number}"] = MESSAGES.dump_json(given, exclude_defaults=True).decode()
        if logged is not None:
            log[str(number)] = stored_step(_portable_step(logged))
            if logged.outcome is not None:
                outcomes[str(number)] = stored_outcome(logged.outcome)
    return log, outcomes


def _portable_step(logged: LoggedStep) -> LoggedStep:
    """Return a step whose hand-off names agents alone: their configurations are the workers'."""
    if (made := logged.handoff) is None:
        return logged
    by, to = (one.model_copy(update={"config": ""}) for one in (made.by, made.to))
    handoff = made.model_copy(update={"by": by, "to": to})
    return logged.model_copy(update={"handoff": handoff})


def _header(checkpoint: AgentCheckpoint, state: AgentState) -> dict[str, Any]:
    outcome, ending, info = state.last_continuation_outcome, checkpoint.ending, state.info
    header: dict[str, Any] = {
        "created": milliseconds(info.started_at),
        "updated": milliseconds(info.updated_at),
        "outcome": stored_outcome(outcome),
    }
    if ending is not None:
        header |= {
            "stop_reason": ending.stop_reason.value,
            "error": ending.error or "",
            "ended": milliseconds(ending.ended_at),
        }
        if info.execution_started_at is not None:
            header["execution_started"] = milliseconds(info.execution_started_at)
    return header


def _origin(checkpoint: AgentCheckpoint) -> RunOrigin:
    return RunOrigin(
        kind=OriginKind.CHECKPOINT,
        run_id=checkpoint.run_id,
        at=len(checkpoint.steps),
        tokens=checkpoint.state.session_usage.total_tokens,
        cost_usd=checkpoint.state.session_cost_usd,
    )


def forked(
    run: StoredRun,
    run_id: str,
    base: AgentConfig,
    overrides: Mapping[str, Any] | None = None,
    *,
    at: int | None = None,
    message: tuple[Message, ...] = (),
    metadata: Mapping[str, Any] | None = None,
) -> ImportedRun:
    """Return the run to create. Counters and costs of the copied steps are kept.

    `at` None means: after all steps. `base` is the stored configuration, `overrides` the fork's own
    changes to it; `message` takes the place of what the run was given there. Raises
    `ConfigurationError`, with the fix, where `run` has no such step or the fork would end at once.
    """
    at, own = checked_at(run, at), dict(overrides or {})
    config = base.with_overrides(own)
    config.check_tool_choice()
    log = _log(run, at, message)
    state = _state(run, at, run_id, turns=bool(message))
    if metadata is not None:
        state = state.model_copy(update={"metadata": dict(metadata)})
    _check_has_work(run, at, log)
    ensure_resumable(run.run_id, criteria_without_code(config), state, "fork")
    return ImportedRun(
        run=NewRun(
            run_id=run_id,
            agent=config.name,
            config=base.digest,
            messages=(),
            max_steps=config.max_steps,
            model=config.model,
            overrides=own,
            metadata=state.metadata,
            tenant=run.header.get("tenant"),
            origin=RunOrigin(
                kind=OriginKind.FORK,
                run_id=run.run_id,
                at=at,
                tokens=state.session_usage.total_tokens,
                cost_usd=state.session_cost_usd,
            ),
        ),
        state=state,
        step=at,
        log=log,
        outcomes={
            str(number): stored_outcome(logged.outcome)
            for number, logged in enumerate(run.log[:at])
            if logged.outcome is not None
        },
    )


def with_tools(config: AgentConfig, known: AgentConfig, names: Sequence[str]) -> AgentConfig:
    """Return `config` with the tools of those names, of its own or of `known` by its workers.

    Raises `ConfigurationError` for a tool that neither has.
    """
    there: dict[str, ToolRef] = {one.name: one for one in (*known.tools, *config.tools)}
    missing = [name for name in names if name not in there]
    if missing:
        msg = (
            f"field 'tools': agent {config.name!r} has no tool {missing[0]!r}; "
            f"choose among: {', '.join(sorted(there)) or 'it has none'}"
        )
        raise ConfigurationError(msg)
    return config.model_copy(update={"tools": tuple(there[name] for name in names)})


def _log(run: StoredRun, at: int, message: tuple[Message, ...]) -> dict[str, str]:
    log = {
        name: value
        for name, value in run.fields.items()
        if (name.isdigit() and int(name) < at)
        or (name.startswith("input:") and int(name.partition(":")[2]) <= at)
    }
    if message:
        log[f"input:{at}"] = MESSAGES.dump_json(message, exclude_defaults=True).decode()
    return log


def _state(run: StoredRun, at: int, run_id: str, *, turns: bool) -> AgentState:
    state = state_before(run.state, run.log, at)
    last = run.log[at - 1] if at else None
    ended = last is not None and last.outcome is not None and not last.outcome.should_continue
    if turns and ended and last and last.execution == state.info.execution:
        state = state.next_execution()
    update: dict[str, Any] = {
        "status": Lifecycle.IN_PROGRESS if at else Lifecycle.QUEUED,
        "parent_agent_id": None,
        "last_continuation_outcome": None,
    }
    return renamed(state.model_copy(update=update), run_id)


def _check_has_work(run: StoredRun, at: int, log: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` where the run had its answer and no new message."""
    outcome = run.log[at - 1].outcome if at else None
    if outcome is None or outcome.should_continue or f"input:{at}" in log:
        return
    if outcome.stop_reason in _HAD_ITS_ANSWER:
        msg = (
            f"field 'at': run {run.run_id} had its answer with step {at}; fork it before that "
            f"(at={at - 1}), or give it a further message"
        )
        raise ConfigurationError(msg)
