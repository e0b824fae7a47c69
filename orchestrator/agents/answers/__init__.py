"""The answer contract: what counts as a run's answer, and what the model is told until it gives it.

Knows neither workers nor stores. `contract` is the reasoner that runs follow.
"""

from stepfleet.orchestrator.agents.answers.sinks import ErrorSink, MessagesSink, RecordsSink
from stepfleet.orchestrator.agents.answers.special import (
    Continue,
    Outcome,
    ReturnAnswer,
    ReturnResult,
    SpecialTool,
)

__all__ = [
    "Continue",
    "ErrorSink",
    "MessagesSink",
    "Outcome",
    "RecordsSink",
    "ReturnAnswer",
    "ReturnResult",
    "SpecialTool",
]
