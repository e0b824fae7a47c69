"""The record of a checkpoint. Each fact is in it once; `full_state` and `log` join them.

Holds neither code nor credentials: tools are names, and where a model is called is the agent's.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Self

from pydantic import Field, ValidationError

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.models.pricing.ledger import CostStatistics, ModelCall
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run.facts import RunOrigin
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import LoggedStep
from stepfleet.orchestrator.records.text.validation import explain_invalid
from stepfleet.orchestrator.records.usage import (
    MOST_TOKENS_OF_RUN,
    MOST_USD_OF_RUN,
    UsageStats,
    is_plausible,
)

VERSION = "1.0"


class CheckpointStep(Record):
    """One committed step, its messages and tool calls by number.

    `given` messages were given to the run before it, `messages` it has added; both stand in the
    conversation in that order. `tool_calls` of the tool traces are its own.
    """

    given: int = Field(default=0, ge=0)
    messages: int = Field(default=0, ge=0)
    tool_calls: int = Field(default=0, ge=0)
    logged: LoggedStep


class CheckpointEnding(Record):
    """How a run had ended, if it had."""

    stop_reason: StopReason
    error: str | None = None
    ended_at: datetime


class AgentCheckpoint(Record):
    """Everything of a run at the end of one of its steps.

    `given` messages at the end of the conversation wait for the next step; `instructed` is 1
    where the conversation begins with the agent's instructions. `cost_calls` are as they were
    priced when they were made. `metadata` is the run's own.
    """

    version: str = VERSION
    timestamp: datetime
    run_id: str
    config: AgentConfig
    conversation_history: tuple[Message, ...] = ()
    state: AgentState
    tool_traces: tuple[ToolCallRecord, ...] = ()
    last_result: Any = None
    last_error: str | None = None
    last_output: str | None = None
    cost_calls: tuple[ModelCall, ...] = ()
    cost_statistics: CostStatistics = Field(default_factory=CostStatistics)
    metadata: dict[str, Any] = Field(default_factory=dict)
    steps: tuple[CheckpointStep, ...] = ()
    instructed: int = Field(default=0, ge=0, le=1)
    given: int = Field(default=0, ge=0)
    ending: CheckpointEnding | None = None
    origin: RunOrigin | None = None
    lost_attempts: tuple[LostAttempt, ...] = ()
    tenant: str | None = None

    @property
    def full_state(self) -> AgentState:
        """The run's state with its conversation, tool results and last values."""
        return self.state.model_copy(
            update={
                "messages": self.conversation_history,
                "tool_results": self.tool_traces,
                "last_result": self.last_result,
                "last_error": self.last_error,
                "last_output": self.last_output,
                "metadata": self.metadata,
            }
        )

    def log(self) -> Iterator[tuple[tuple[Message, ...], LoggedStep | None]]:
        """Yield what was given before each step, and the step; at last what waits, and None."""
        place, call = self.instructed, 0
        for step in self.steps:
            answered = place + step.given
            following = answered + step.messages
            calls = self.tool_traces[call : call + step.tool_calls]
            result = step.logged.result.model_copy(update={"tool_calls": calls})
            messages = self.conversation_history[answered:following]
            logged = step.logged.model_copy(update={"result": result, "messages": messages})
            yield self.conversation_history[place:answered], logged
            place, call = following, call + step.tool_calls
        yield self.conversation_history[place:], None

    def to_dict(self) -> dict[str, Any]:
        """Return the checkpoint as JSON data: every field of its own, defaults left out within."""
        full = self.model_dump(mode="json", exclude_computed_fields=True)
        compact = self.model_dump(mode="json", exclude_computed_fields=True, exclude_defaults=True)
        return {**full, **compact, "config": full["config"]}

    def to_json(self) -> str:
        """Return `to_dict` as text."""
        return exact_json.text(self.to_dict())

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Read what `to_dict` returns.

        Raises `SerializationError` for another version, or for what is no checkpoint.
        """
        if not isinstance(data, dict):
            raise SerializationError("a checkpoint is one JSON object")
        if data.get("version") != VERSION:
            msg = (
                f"field 'version' of the checkpoint is {data.get('version')!r}; this version of "
                f"Stepfleet reads {VERSION!r}: use the one that wrote it, or a newer one"
            )
            raise SerializationError(msg)
        try:
            checkpoint = cls.model_validate(data)
        except ValidationError as error:
            msg = f"this is no whole checkpoint: {explain_invalid(error)}"
            raise SerializationError(msg) from error
        checkpoint.check()
        return checkpoint

    @classmethod
    def from_json(cls, data: str | bytes) -> Self:
        """Read what `to_json` returns. Raises `SerializationError`."""
        try:
            found = exact_json.loads(data)
        except ValueError as error:
            msg = f"the checkpoint is not valid JSON ({error}); it may have been cut off"
            raise SerializationError(msg) from None
        return cls.from_dict(found)

    def check(self) -> None:
        """Raise `SerializationError` where numbers cannot be, or do not fit the lists."""
        self._check_amounts()
        messages = sum(one.given + one.messages for one in self.steps)
        messages += self.instructed + self.given
        calls = sum(one.tool_calls for one in self.steps)
        for name, there, wanted in (
            ("conversation_history", len(self.conversation_history), messages),
            ("tool_traces", len(self.tool_traces), calls),
        ):
            if there != wanted:
                msg = (
                    f"field {name!r} of the checkpoint has {there} entries; its steps say {wanted}"
                )
                raise SerializationError(msg)

    def _check_amounts(self) -> None:
        none = UsageStats()
        amounts = [
            ("state.usage", self.state.usage, self.state.cost_usd),
            ("state.session_usage", self.state.session_usage, self.state.session_cost_usd),
        ]
        for at, step in enumerate(self.steps):
            result = step.logged.result
            amounts.append((f"steps.{at}.logged.result", result.usage or none, result.cost_usd))
            if made := step.logged.remembered and step.logged.remembered.summary:
                amounts.append((f"steps.{at}.logged.remembered", made.usage, made.cost_usd))
        for name, usage, cost in amounts:
            if not is_plausible(usage, cost):
                msg = (
                    f"field {name!r} of the checkpoint has tokens or a cost that cannot be; write "
                    f"whole numbers from 0 to {MOST_TOKENS_OF_RUN:,}, and USD up to "
                    f"{MOST_USD_OF_RUN:,.0f}"
                )
                raise SerializationError(msg)
