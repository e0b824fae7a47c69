"""The state of a run between two steps. Pure values; `with_...` methods return copies."""

import copy
import operator
from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import ConfigDict, Field

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.tools import LoggedCalls, ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.errors import ErrorContext
from stepfleet.orchestrator.records.memory_window import Window
from stepfleet.orchestrator.records.outcome import ContinuationOutcome, RunAnswer
from stepfleet.orchestrator.records.steps import FinishReason, StepResult, StepType
from stepfleet.orchestrator.records.usage import LostUse, UsageStats, sum_usd

ToolResults = tuple[ToolCallRecord, ...] | LoggedCalls


class Lifecycle(StrEnum):
    """The status of a run; the last four are end states."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STOPPED = "stopped"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing new starts in this state."""
        return self in TERMINAL


TERMINAL = frozenset(
    {Lifecycle.COMPLETED, Lifecycle.FAILED, Lifecycle.CANCELLED, Lifecycle.STOPPED}
)
NOT_COMPLETED = TERMINAL - {Lifecycle.COMPLETED}


class StateInfo(Record):
    """Identity and the three clocks of a run.

    `started_at`: when the session was created, set once. `execution_started_at`: when a
    worker first claimed the current execution. `cumulative_execution_seconds`: the sum of
    the step durations of the current execution. `updated_at` is the moment, by Redis's
    clock, that this state describes: criteria compare against it instead of a local clock.
    """

    id: str
    execution_id: str = ""
    execution: int = 1
    started_at: datetime
    updated_at: datetime
    execution_started_at: datetime | None = None
    cumulative_execution_seconds: float = 0.0

    def add_execution_time(self, seconds: float) -> "StateInfo":
        """Return a copy whose cumulative time is `seconds` longer."""
        total = self.cumulative_execution_seconds + seconds
        return self.model_copy(update={"cumulative_execution_seconds": total})

    def at(self, moment: datetime) -> "StateInfo":
        """Return a copy that describes `moment`."""
        return self.model_copy(update={"updated_at": moment})


class _ExecutionNumber(Record):
    model_config = ConfigDict(extra="ignore")

    execution: int = 1


class HandOff(Record):
    """A stored state of which only the number of its execution is read."""

    model_config = ConfigDict(extra="ignore")

    info: _ExecutionNumber


class _TimeInSteps(Record):
    model_config = ConfigDict(extra="ignore")

    cumulative_execution_seconds: float = 0.0


class Used(Record):
    """A stored state of which only that is read which limits of the execution count."""

    model_config = ConfigDict(extra="ignore")

    info: _TimeInSteps
    step_count: int = 0
    usage: UsageStats = UsageStats()
    below_usage: UsageStats = UsageStats()
    cost_usd: float = 0.0
    below_cost_usd: float = 0.0
    lost: LostUse = LostUse()

    def of(self, limit: str) -> int | float:
        """Return what counts against the limit of that name; the wall clock begins anew."""
        match limit:
            case "max_steps":
                return self.step_count
            case "token_limit":
                return self.usage.total_tokens + self.below_usage.total_tokens + self.lost.tokens
            case "cumulative_timeout":
                return self.info.cumulative_execution_seconds
            case "budget_usd":
                return sum_usd(self.cost_usd, self.below_cost_usd, self.lost.cost_usd)
        return 0


class _TimeOfExecution(_ExecutionNumber):
    cumulative_execution_seconds: float = 0.0


class EndState(Record):
    """A stored state of which only that is read which the run's result has."""

    model_config = ConfigDict(extra="ignore")

    info: _TimeOfExecution
    parent_agent_id: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    session_usage: UsageStats = UsageStats()
    session_cost_usd: float = 0.0
    session_below_usage: UsageStats = UsageStats()
    session_below_cost_usd: float = 0.0
    last_output: str | None = None
    answer: RunAnswer | None = None
    last_continuation_outcome: ContinuationOutcome | None = None


class LastStep(Record):
    """The facts of the newest step, for criteria."""

    step: int
    type: StepType
    has_tool_calls: bool
    finish_reason: FinishReason
    text: str | None = None
    refused: str = Field(default="", exclude_if=operator.not_)
    """Why its answer was not taken by the answer contract."""

    @classmethod
    def of(cls, result: StepResult) -> "LastStep":
        """Return the facts of `result`."""
        return cls.model_construct(
            step=result.step,
            type=result.type,
            has_tool_calls=result.has_tool_calls,
            finish_reason=result.finish_reason,
            text=result.thought,
            refused=result.refused,
        )


class AgentState(Record):
    """The state of one run. All counters are of the current execution unless they say session.

    `messages` and `tool_results` come from the log; everything else travels in the run's
    header from step to step (the hand-off profile).
    """

    agent_id: str
    parent_agent_id: str | None = None
    info: StateInfo
    status: Lifecycle = Lifecycle.QUEUED
    messages: tuple[Message, ...] = ()
    tool_results: ToolResults = ()
    metadata: dict[str, Any] = Field(default_factory=dict)
    step_count: int = 0
    session_steps: int = 0
    usage: UsageStats = UsageStats()
    session_usage: UsageStats = UsageStats()
    cost_usd: float = 0.0
    session_cost_usd: float = 0.0
    below_usage: UsageStats = UsageStats()
    """What the runs used that this one has started, and all below these."""
    session_below_usage: UsageStats = UsageStats()
    below_cost_usd: float = 0.0
    session_below_cost_usd: float = 0.0
    lost: LostUse = Field(default=LostUse(), exclude=True)
    """What calls of attempts that were not committed have cost, or may have: the header has it."""
    session_lost: LostUse = Field(default=LostUse(), exclude=True)
    current_step: LastStep | None = None
    failures: ErrorContext = Field(default_factory=ErrorContext.none)
    stop_requested: str | None = None
    strategy_state: dict[str, Any] = Field(default_factory=dict)
    custom_state: dict[str, Any] = Field(default_factory=dict)
    last_result: Any = None
    last_error: str | None = None
    last_output: str | None = None
    answer: RunAnswer | None = None
    window: Window | None = None
    last_continuation_outcome: ContinuationOutcome | None = None

    def with_message(self, message: Message) -> "AgentState":
        """Return a copy with `message` at the end of the conversation."""
        return self._changed(messages=(*self.messages, message))

    def with_tool_result(self, record: ToolCallRecord) -> "AgentState":
        """Return a copy with `record` after the other tool results."""
        return self._changed(tool_results=(*self.tool_results, record))

    def with_lost(self, lost: LostUse) -> "AgentState":
        """Return a copy with the cost of calls that no step will have."""
        if not (lost.calls or lost.tokens or lost.cost_usd):
            return self
        return self._changed(lost=self.lost + lost, session_lost=self.session_lost + lost)

    def with_continuation_outcome(self, outcome: ContinuationOutcome) -> "AgentState":
        """Return a copy that remembers `outcome` as the newest one."""
        return self._changed(last_continuation_outcome=outcome)

    def next_execution(self) -> "AgentState":
        """Return the state at the start of the next execution of the same run.

        Counters, clocks, failures and the strategy's state of the execution start anew; the
        conversation, identity, metadata, custom state and the session's totals stay.
        """
        number = self.info.execution + 1
        info = self.info.model_copy(
            update={
                "execution": number,
                "execution_id": f"{self.info.id}:{number}",
                "execution_started_at": None,
                "cumulative_execution_seconds": 0.0,
            }
        )
        return self._changed(
            info=info,
            step_count=0,
            usage=UsageStats(),
            cost_usd=0.0,
            below_usage=UsageStats(),
            below_cost_usd=0.0,
            lost=LostUse(),
            current_step=None,
            failures=ErrorContext(),
            stop_requested=None,
            last_error=None,
            strategy_state={},
            answer=None,
            last_continuation_outcome=None,
        )

    def reset(self) -> "AgentState":
        """Return the state that the session began with: its system messages, counters at zero."""
        info = StateInfo.model_construct(
            id=self.info.id,
            execution_id=f"{self.info.id}:1",
            started_at=self.info.started_at,
            updated_at=self.info.updated_at,
        )
        system = tuple(message for message in self.messages if message.is_system())
        return AgentState.model_construct(
            agent_id=self.agent_id,
            parent_agent_id=self.parent_agent_id,
            info=info,
            messages=system,
            metadata=copy.deepcopy(self.metadata),
        )

    def _changed(self, **fields: Any) -> "AgentState":
        nested = {
            name: copy.deepcopy(value) if (value := getattr(self, name)) else {}
            for name in ("metadata", "strategy_state", "custom_state")
        }
        return self.model_copy(update={**nested, **fields})
