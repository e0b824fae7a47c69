"""The hand-off profile: what of a run's state travels in its header from step to step.

All counters, clocks and failures, so that any worker decides as the one before it would have;
no messages and no step bodies, which the log holds whole. Nothing is shortened here.
"""

from stepfleet.orchestrator.records.state import AgentState

NOT_IN_HANDOFF = frozenset({"messages", "tool_results", "last_continuation_outcome", "status"})
"""Held elsewhere: messages and tool results in the log, outcome and status beside the state."""
_EXCLUDED = set(NOT_IN_HANDOFF)


def handoff(state: AgentState) -> str:
    """Return the hand-off form of a state (JSON): everything but what is held elsewhere."""
    return state.model_dump_json(exclude=_EXCLUDED, exclude_defaults=True)
