"""A fork: a new run that begins with the first steps of another one and goes its own way. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepfleet.orchestrator.agents.agent import criteria_without_code
from stepfleet.orchestrator.agents.config import AgentConfig, ToolRef
from stepfleet.orchestrator.client.checkpoints.capture import checked_at
from stepfleet.orchestrator.client.control.resumable import ensure_resumable
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.protocol.revision import renamed, state_before
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run.facts import OriginKind, RunOrigin
from stepfleet.orchestrator.records.state import AgentState, Lifecycle
from stepfleet.orchestrator.store.records.codec import MESSAGES, stored_outcome
from stepfleet.orchestrator.store.runs.reading import StoredRun
from stepfleet.orchestrator.store.runs.submission import ImportedRun, NewRun

_HAD_ITS_ANSWER = (StopReason.COMPLETED, StopReason.FINISH_REASON)


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """A fork to create. `at` None means: after all steps.

    `config` is the stored one, `overrides` the fork's own changes to it; `message` takes the
    place of what the run was given there.
    """

    run_id: str
    config: AgentConfig
    overrides: Mapping[str, Any] = field(default_factory=dict)
    at: int | None = None
    message: tuple[Message, ...] = ()
    metadata: Mapping[str, Any] | None = None


def forked(run: StoredRun, order: ForkOrder) -> ImportedRun:
    """Return the run to create. Counters and costs of the copied steps are kept.

    Raises `ConfigurationError`, with the fix, where `run` has no such step or the fork would
    end at once.
    """
    at = checked_at(run, order.at)
    config = order.config.with_overrides(order.overrides)
    config.check_tool_choice()
    log = _log(run, at, order.message)
    state = _state(run, at, order)
    _check_has_work(run, at, log)
    ensure_resumable(run.run_id, criteria_without_code(config), state, "fork")
    return ImportedRun(
        run=NewRun(
            run_id=order.run_id,
            agent=config.name,
            config=order.config.digest,
            messages=(),
            max_steps=config.max_steps,
            model=config.model,
            overrides=dict(order.overrides),
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


def _state(run: StoredRun, at: int, order: ForkOrder) -> AgentState:
    state = state_before(run.state, run.log, at)
    last = run.log[at - 1] if at else None
    ended = last is not None and last.outcome is not None and not last.outcome.should_continue
    if order.message and ended and last and last.execution == state.info.execution:
        state = state.next_execution()
    update: dict[str, Any] = {
        "status": Lifecycle.IN_PROGRESS if at else Lifecycle.QUEUED,
        "parent_agent_id": None,
        "last_continuation_outcome": None,
    }
    if order.metadata is not None:
        update["metadata"] = dict(order.metadata)
    return renamed(state.model_copy(update=update), order.run_id)


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
