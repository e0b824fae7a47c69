"""One step as it was committed. Pure values."""

import operator
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import ConfigDict, Field, computed_field

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.answers import RunEnd
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import ADDED, Message
from stepfleet.orchestrator.records.errors import ErrorInfo, answer_refusal
from stepfleet.orchestrator.records.memory_window import Remembered
from stepfleet.orchestrator.records.outcome import ContinuationOutcome, RunAnswer
from stepfleet.orchestrator.records.usage import CacheUse, Fallback, UsageStats


class StepType(StrEnum):
    """The type of a step, by its result."""

    TOOL_EXECUTION = "tool_execution"
    FINAL_RESPONSE = "final_response"
    PLANNING = "planning"
    ERROR = "error"


class FinishReason(StrEnum):
    """Why the model stopped writing, in one vocabulary for all providers.

    `pause`: its provider paused a turn in which it uses tools of its own; another step goes on.
    """

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    PAUSE = "pause"
    ERROR = "error"
    OTHER = "other"


SHORTENED = {
    FinishReason.LENGTH: "cut at the token limit (max_tokens)",
    FinishReason.CONTENT_FILTER: "cut by the provider's content filter",
}
"""What happened to an answer with such a finish reason, which is not all of it."""


class StepErrors(Record):
    """What went wrong in a step."""

    step: int
    errors: tuple[ErrorInfo, ...] = ()
    refused: str = Field(default="", exclude_if=operator.not_)

    @property
    def problems(self) -> tuple[ErrorInfo, ...]:
        """The errors, and the refusal of its answer."""
        return problems_of(self.errors, self.refused)


def problems_of(errors: tuple[ErrorInfo, ...], refused: str) -> tuple[ErrorInfo, ...]:
    """Return why a step did not end its run: errors, and a refused answer."""
    return (*errors, answer_refusal(refused)) if refused else errors


class StepResult(Record):
    """One think-act cycle: one model call and its tool calls.

    `step` counts from 1. `thought` is the model's text. `usage` and `cost_usd` are this
    step's alone; `usage_reported` is false when the provider sent no usage: then both are
    estimates, or nothing was used. `duration_ms`
    is the monotonic wall span of model call and tools. `cache` is set where the response cache
    took part in the call, `fallback` where other models of the agent's list had failed before.
    `reasoning` is the text in which the model reasoned, where its provider shows it; `request_id`
    is the provider's own name of the call's request, which its support asks for.
    Before the call the step waited for `waited_seconds` for limits of the fleet, for `waited_for`
    in the end; its duration does not include that. `agent` made the step; it is empty where all
    steps of a run are of one agent. `refused` says why the answer contract did not take its answer,
    which does not fail the step. `service_tier` is the provider's tier in which the call was
    served, empty for its standard one. With `price_estimated` no table has a price for a model of
    the step, and its cost is by the default price.
    """

    # Computed fields of `to_dict` are accepted again.
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
    cache: CacheUse | None = Field(default=None, exclude_if=operator.not_)
    fallback: Fallback | None = Field(default=None, exclude_if=operator.not_)
    reasoning: str = Field(default="", exclude_if=operator.not_)
    request_id: str = Field(default="", exclude_if=operator.not_)
    waited_seconds: float = Field(default=0.0, exclude_if=operator.not_)
    waited_for: str = Field(default="", exclude_if=operator.not_)
    agent: str = Field(default="", exclude_if=operator.not_)
    refused: str = Field(default="", exclude_if=operator.not_)
    service_tier: str = Field(default="", exclude_if=operator.not_)
    price_estimated: bool = Field(default=False, exclude_if=operator.not_)

    @property
    def problems(self) -> tuple[ErrorInfo, ...]:
        """The errors, and the refusal of its answer."""
        return problems_of(self.errors, self.refused)

    @property
    def cached(self) -> bool:
        """Whether the model's answer came from the response cache: no call was made."""
        return self.cache is not None and self.cache.hit

    @property
    def usage_estimated(self) -> bool:
        """Whether the step's tokens were counted here: its provider reported none."""
        return not self.usage_reported and self.usage is not None and self.usage.total_tokens > 0

    @property
    def runs(self) -> tuple[RunEnd, ...]:
        """The runs that its calls have started, and which have ended."""
        return tuple(call.run for call in self.tool_calls if call.run is not None)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def has_tool_calls(self) -> bool:
        """Whether the model called tools."""
        return bool(self.tool_calls)


class Progress(Record):
    """The meaning of a response beyond its tools, as the agent's reasoner reads it.

    `messages` follow the tool messages. `step_type` replaces the step's type. The entries of
    `strategy_state` and `custom_state` replace those of the same name in the run's state;
    `strategy_append` puts items at the end of lists of the strategy state. `output` is the
    text for people where the model's own is not. `error` makes the step a failed one. `refused`
    says why an answer was not taken; with `is_preamble` the turn's text is not the run's output.
    """

    messages: tuple[Message, ...] = ()
    step_type: StepType | None = None
    answer: RunAnswer | None = None
    output: str | None = None
    strategy_state: dict[str, Any] = Field(default_factory=dict)
    strategy_append: dict[str, list[Any]] = Field(default_factory=dict)
    custom_state: dict[str, Any] = Field(default_factory=dict)
    error: ErrorInfo | None = None
    refused: str = Field(default="", exclude_if=operator.not_)
    is_preamble: bool = Field(default=False, exclude_if=operator.not_)


class RunAgent(Record):
    """The agent of a run at some point, and the changes of the run to its configuration.

    `config` is the digest of its stored configuration; empty stands for the announced one.
    """

    name: str
    config: str = ""
    overrides: dict[str, Any] = Field(default_factory=dict)


class HandedOver(Record):
    """A step after which another agent goes on with the run.

    With `trims` the log before the window of the run's memory is gone.
    """

    by: RunAgent
    to: RunAgent
    reason: str = ""
    trims: bool = False


class Handoff(Record):
    """A hand-off in a run's result: `step` (from 1) was the last one of the agent `by`."""

    step: int
    by: str
    to: str
    reason: str = ""


class LoggedStep(Record):
    """The log entry of one committed step. Writing it twice is harmless.

    `execution` numbers the run's executions from 1; `committed_at` is Redis's time.
    `progress` holds the step's changes of the state beyond its result; its messages are among
    `messages`. `remembered` is set where the step moved the window of the run's memory.
    `default_priced` names the models of its calls that no table has. `handoff` is set where another
    agent goes on with the run.
    """

    result: StepResult
    messages: tuple[Message, ...] = ()
    outcome: ContinuationOutcome | None = None
    execution: int = 1
    committed_at: datetime | None = None
    progress: Progress | None = None
    remembered: Remembered | None = None
    default_priced: tuple[str, ...] = Field(default=(), exclude_if=operator.not_)
    handoff: HandedOver | None = Field(default=None, exclude_if=operator.not_)

    @property
    def priced_result(self) -> StepResult:
        """The step, marked where its cost is by the default price."""
        return _priced(self.result, self.default_priced)


def _priced(result: StepResult, default_priced: Sequence[str]) -> StepResult:
    return result.model_copy(update={"price_estimated": True}) if default_priced else result


class _Unread(Record):
    """A record whose content is not read."""

    model_config = ConfigDict(extra="ignore")


class _PartOfStep(Record):
    """A logged step of which a part is read.

    All fields are known by name, so that a record of a later release is refused.
    """

    outcome: _Unread | None = None
    execution: int = 1
    committed_at: str | None = None
    progress: _Unread | None = None
    remembered: _Unread | None = None
    default_priced: tuple[str, ...] = ()


class StepMessages(_PartOfStep):
    """A logged step as claims read it: its messages."""

    messages: tuple[Message, ...] = ()
    result: _Unread
    handoff: _Unread | None = None


class LoggedResult(_PartOfStep):
    """A logged step as results of runs have it: without its messages."""

    result: StepResult
    messages: tuple[_Unread, ...] = ()
    handoff: HandedOver | None = None

    @property
    def priced_result(self) -> StepResult:
        """The step, marked where its cost is by the default price."""
        return _priced(self.result, self.default_priced)


_OF_REASONERS = frozenset({"contract", "planning", "strategy"})


def for_its_agent(steps: Sequence[StepMessages]) -> list[tuple[Message, ...]]:
    """Return the messages of steps as the agent that has the run now gets them.

    Reminders that were for an agent before it are left out.
    """
    said = [one.messages for one in steps]
    newest = next((at for at in range(len(steps) - 1, -1, -1) if steps[at].handoff), -1)
    for at in range(newest + 1):
        said[at] = tuple(one for one in said[at] if one.metadata.get(ADDED) not in _OF_REASONERS)
    return said


class _ReadErrors(StepErrors):
    model_config = ConfigDict(extra="ignore")


class LoggedErrors(Record):
    """A logged step as failures are counted: its number, execution and errors."""

    model_config = ConfigDict(extra="ignore")

    result: _ReadErrors
    execution: int = 1


def by_agents(
    log: Sequence[LoggedStep | LoggedResult],
) -> tuple[tuple[StepResult, ...], tuple[Handoff, ...]]:
    """Return the steps of a log, and its hand-offs; with these, the steps name their agents."""
    agent = next((one.handoff.by.name for one in log if one.handoff), "")
    if not agent:
        return tuple(one.priced_result for one in log), ()
    steps, found = [], []
    for one in log:
        steps.append(one.priced_result.model_copy(update={"agent": agent}))
        if (made := one.handoff) is not None:
            by, to, reason = made.by.name, made.to.name, made.reason
            found.append(Handoff(step=one.result.step, by=by, to=to, reason=reason))
            agent = to
    return tuple(steps), tuple(found)
