"""Whether a run that is taken up, forked or restored would get anywhere. Pure."""

from stepfleet.orchestrator.agent import criteria_of
from stepfleet.orchestrator.config import AgentConfig
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.state import AgentState

_FIELDS = {
    StopReason.STEPS_LIMIT: "max_steps",
    StopReason.TOKEN_LIMIT: "token_limit",
    StopReason.TIME_LIMIT: "time_limit (or cumulative_timeout)",
    StopReason.GUARD: "budget_usd",
}


def check_goes_on(run_id: str, config: AgentConfig, state: AgentState, verb: str) -> None:
    """Raise `ConfigurationError`, with the fix, if a limit would end the run at once again.

    `verb` is what the caller does: `retry`, `fork`, `restore`.
    """
    outcome = criteria_of(config).evaluate(state)
    if outcome.get_forbidding_criterion() is None:
        return
    field = _FIELDS.get(outcome.stop_reason)
    fix = f"raise it: {verb} with {field}=..." if field else "change what it names"
    raise ConfigurationError(f"run {run_id} would end at once again ({outcome.reason}); {fix}")
