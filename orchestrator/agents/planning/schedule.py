"""Which steps are planning turns, and where the strategy state keeps a plan. Pure."""

from typing import Any

from stepfleet.orchestrator.agents.planning.plan import Plan
from stepfleet.orchestrator.agents.planning.settings import Planning
from stepfleet.orchestrator.records.state import AgentState

PLAN = "plan"
"""The plan, a list of steps with text and state."""
PLANNED_AT = "planned_at"
"""How many steps the execution had when it last planned."""


def is_planning_turn(state: AgentState, planning: Planning) -> bool:
    """Return whether the step behind `state` is for planning.

    A planning turn that failed is due again, since only one that was read is remembered.
    """
    planned_at = state.strategy_state.get(PLANNED_AT)
    if planned_at is None:
        waited = planning.every > 0 and state.step_count >= planning.every
        return planning.at_start or waited
    return planning.every > 0 and state.step_count - int(planned_at) > planning.every


def plan_of(state: AgentState) -> Plan:
    """Return the run's plan; it has no steps where none was made in this execution."""
    return Plan.model_validate({"steps": state.strategy_state.get(PLAN, [])})


def stored_plan(plan: Plan) -> dict[str, Any]:
    """Return the entry of the strategy state that keeps `plan`."""
    return {PLAN: [step.to_dict() for step in plan.steps]}
