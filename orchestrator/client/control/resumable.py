"""Whether a run that is retried, forked or restored could go on. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepfleet.orchestrator.agents.agent import criteria_without_code
from stepfleet.orchestrator.agents.config import AgentConfig, merged_overrides, stored_overrides
from stepfleet.orchestrator.continuation.collection import ContinuationCriteria
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.outcome import ContinuationOutcome, StopReason
from stepfleet.orchestrator.records.state import AgentState, Lifecycle

_FIELDS = {
    StopReason.STEPS_LIMIT: "max_steps",
    StopReason.TOKEN_LIMIT: "token_limit",
    StopReason.TIME_LIMIT: "time_limit",
    StopReason.GUARD: "budget_usd",
}


@dataclass(frozen=True, slots=True)
class Changes:
    """A run's changed configuration: all its `overrides`, and the criteria with its new limits."""

    overrides: dict[str, Any]
    criteria: ContinuationCriteria


def changes_of(
    config: AgentConfig, overrides: Mapping[str, Any], further: Mapping[str, Any]
) -> Changes:
    """Return the changes of a run whose `config` includes its `overrides`, with `further` ones.

    Runs with the same configuration and overrides can share it. Raises `ConfigurationError` that
    names the field where one is unknown or invalid.
    """
    own = stored_overrides(config, further)
    criteria = criteria_without_code(config.with_overrides(own))
    return Changes(merged_overrides(overrides, own), criteria)


def ensure_resumable(
    run_id: str, criteria: ContinuationCriteria, state: AgentState, verb: str
) -> None:
    """Raise `ConfigurationError`, with the fix, if a limit would end the run at once again.

    `verb` is the caller's: `retry`, `fork`, `restore`.
    """
    if not criteria.forbids(state):
        return
    outcome = criteria.evaluate(state)
    field = _FIELDS.get(outcome.stop_reason)
    fix = f"raise it: {verb} with {field}={_higher(outcome)}" if field else "change what it names"
    raise ConfigurationError(f"run {run_id} would end at once again ({outcome.reason}); {fix}")


def _higher(outcome: ContinuationOutcome) -> str:
    """Return twice the limit that a run has reached, or twice what it used."""
    facts = (one.context for one in outcome.evaluations if one.criterion == outcome.resolved_by)
    known = next(facts, {})
    numbers = [one for one in map(known.get, ("value", "limit")) if isinstance(one, int | float)]
    return str(round(2 * max(numbers), 6)) if numbers else "..."


def ensure_not_completed(run_id: str, state: AgentState) -> None:
    """Raise `ConfigurationError` for a completed run."""
    if state.status is Lifecycle.COMPLETED:
        msg = f"run {run_id} completed; there is nothing to retry (submit it as a new run)"
        raise ConfigurationError(msg)
