"""Reasoning strategies: the prompts of an agent, and its record of its turns.

Decides what a strategy sends and notes; must not know workers, stores or providers.
"""

from stepfleet.orchestrator.agents.strategies.built_in import (
    ChainOfThought,
    NoOp,
    ReAct,
    make_strategy,
    stored_name,
)
from stepfleet.orchestrator.agents.strategies.reasoner import StrategyReasoner
from stepfleet.orchestrator.agents.strategies.strategy import (
    OutputMode,
    StateChange,
    Strategy,
    StrategyContext,
)

__all__ = [
    "ChainOfThought",
    "NoOp",
    "OutputMode",
    "ReAct",
    "StateChange",
    "Strategy",
    "StrategyReasoner",
    "StrategyContext",
    "make_strategy",
    "stored_name",
]
