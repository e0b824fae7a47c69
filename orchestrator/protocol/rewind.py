"""The state in which a run stood before one of its steps, from its log. Pure."""

from collections.abc import Sequence

from stepfleet.orchestrator.protocol.fold import rebuild
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import LoggedStep


def state_before(state: AgentState, log: Sequence[LoggedStep], at: int) -> AgentState:
    """Return the state before step `at` (from 0) of the run that has `state` and `log` now.

    Its messages are those that the steps have added; what was given to the run stands apart.
    """
    fresh = state.reset().model_copy(update={"messages": ()})
    rebuilt = rebuild(fresh, log[:at])
    execution = log[at].execution if at < len(log) else state.info.execution
    while rebuilt.info.execution < execution:
        rebuilt = rebuilt.next_execution()
    return rebuilt


def renamed(state: AgentState, run_id: str) -> AgentState:
    """Return the state as that of a run with another id."""
    execution_id = f"{run_id}:{state.info.execution}"
    info = state.info.model_copy(update={"id": run_id, "execution_id": execution_id})
    return state.model_copy(update={"agent_id": run_id, "info": info})
