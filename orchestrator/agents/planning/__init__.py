"""Planning: the turns in which a run plans, their prompts, and the plan that is kept.

Decides the form of a planning turn; must not know workers, stores or providers.
"""

from stepfleet.orchestrator.agents.planning.plan import (
    Plan,
    PlanStep,
    PlanStepState,
    is_planning_response,
)
from stepfleet.orchestrator.agents.planning.reasoner import (
    PlanningReasoner,
    initial_prompt,
    next_prompt,
    tools_prompt,
)
from stepfleet.orchestrator.agents.planning.settings import Planning

__all__ = [
    "Plan",
    "PlanStep",
    "PlanStepState",
    "Planning",
    "PlanningReasoner",
    "initial_prompt",
    "is_planning_response",
    "next_prompt",
    "tools_prompt",
]
