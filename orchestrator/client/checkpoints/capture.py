"""A checkpoint of a stored run, as it is now or as it was after one of its steps. Pure."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.client.checkpoints.record import (
    AgentCheckpoint,
    CheckpointEnding,
    CheckpointStep,
)
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.pricing.ledger import ModelCall, statistics_of
from stepfleet.orchestrator.protocol.revision import state_before
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.responses import ModelSettings
from stepfleet.orchestrator.records.state import AgentState, Lifecycle
from stepfleet.orchestrator.records.steps import LoggedStep, StepResult
from stepfleet.orchestrator.records.usage import LostUse, UsageStats
from stepfleet.orchestrator.store.records.codec import MESSAGES, in_milliseconds, moment
from stepfleet.orchestrator.store.runs.reading import StoredRun

AGENTS_OWN = ("base_url", "api_key_env", "organization", "extra_body")
"""Settings of a model's address and credentials: code, and never in a checkpoint."""


def capture(run: StoredRun, now: datetime, at: int | None = None) -> AgentCheckpoint:
    """Return the checkpoint of a run at `now`, or as it was after its first `at` steps.

    It shares its records with `run`. Raises `ConfigurationError` where it has not so many.
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
            "cannot be forked or checkpointed; leave trim_log out for runs that shall be"
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
