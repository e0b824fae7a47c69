"""A checkpoint as a run to create: the run itself again, or a copy under another id. Pure.

A checkpoint's file must choose neither code nor addresses: those come from the agent that its
workers announced.
"""

from collections.abc import Mapping
from typing import Any

from stepfleet.orchestrator.agents.config import NOT_PER_RUN, AgentConfig
from stepfleet.orchestrator.batches.files.lines import parse_tenant
from stepfleet.orchestrator.client.checkpoints.record import AgentCheckpoint
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.protocol.revision import renamed
from stepfleet.orchestrator.records.run.facts import OriginKind, RunOrigin
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import LoggedStep
from stepfleet.orchestrator.store.records.codec import (
    MESSAGES,
    milliseconds,
    stored_outcome,
    stored_step,
)
from stepfleet.orchestrator.store.runs.submission import ImportedRun, NewRun

_CHECKED = ("name", "tools")


def of_agent(config: AgentConfig, known: AgentConfig) -> AgentConfig:
    """Return a checkpoint's configuration with the fields of the agent's code from `known`.

    Raises `ConfigurationError` where the agent has not the tools that the run had.
    """
    there = {tool.name for tool in known.tools}
    missing = [tool.name for tool in config.tools if tool.name not in there]
    if missing:
        msg = (
            f"agent {known.name!r} has no tool {missing[0]!r}, which the checkpoint's run had; "
            "deploy it again, or restore with the agent that shall go on"
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
            log[str(number)] = stored_step(_portable(logged))
            if logged.outcome is not None:
                outcomes[str(number)] = stored_outcome(logged.outcome)
    return log, outcomes


def _portable(logged: LoggedStep) -> LoggedStep:
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
