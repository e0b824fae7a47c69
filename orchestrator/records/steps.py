"""One step as it was committed. Pure values."""

from datetime import datetime
from enum import StrEnum

from pydantic import ConfigDict, computed_field

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.errors import ErrorInfo
from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.records.outcome import ContinuationOutcome
from stepfleet.orchestrator.records.tools import ToolCallRecord
from stepfleet.orchestrator.records.usage import UsageStats


class StepType(StrEnum):
    """What a step turned out to be."""

    TOOL_EXECUTION = "tool_execution"
    FINAL_RESPONSE = "final_response"
    ERROR = "error"


class FinishReason(StrEnum):
    """Why the model stopped writing, in one vocabulary for all providers."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    ERROR = "error"
    OTHER = "other"


class StepResult(Record):
    """One think-act cycle: one model call and the tools that it asked for.

    `step` counts from 1. `thought` is the model's text. `usage` and `cost_usd` are this
    step's alone; `usage_reported` is false when the provider sent no usage. `duration_ms`
    is the monotonic wall span of model call and tools.
    """

    # What `to_dict` computes may come back in.
    model_config = ConfigDict(extra="ignore")

    step: int
    thought: str | None = None
    tool_calls: tuple[ToolCallRecord, ...] = ()
    usage: UsageStats | None = None
    usage_reported: bool = True
    cost_usd: float = 0.0
    finish_reason: FinishReason = FinishReason.STOP
    type: StepType = StepType.FINAL_RESPONSE
    errors: tuple[ErrorInfo, ...] = ()
    started_at: datetime
    duration_ms: float = 0.0
    model: str | None = None
    worker: str | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def has_tool_calls(self) -> bool:
        """Whether the model asked for tools."""
        return bool(self.tool_calls)


class LoggedStep(Record):
    """What one committed step added: a log field of the run. Writing it twice is harmless.

    `execution` numbers the run's executions (turns) from 1; `committed_at` is Redis's time.
    """

    result: StepResult
    messages: tuple[Message, ...] = ()
    outcome: ContinuationOutcome | None = None
    execution: int = 1
    committed_at: datetime | None = None
