"""The answer contract: the forms of a run's answer, and the reminders until the model gives it.

Knows neither workers nor stores. `contract` is the reasoner of runs.
"""

from stepfleet.orchestrator.agents.answers.definitions import (
    Continue,
    ErrorSink,
    MessagesSink,
    Outcome,
    RecordsSink,
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
