"""The record of a checkpoint, and its file. Each fact is there once: `full_state`, `log` join them.

Holds neither code nor credentials: tools are names, and where a model is called is the agent's.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.errors import ConfigurationError, SerializationError
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
LARGEST = 256 * 1024 * 1024
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")
"""Run ids that are part of a file's name as they are: no folder, no pattern, nothing hidden."""
_STEPS = r"-\d{6,}\.json"


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

        Raises `SerializationError` for another version, or for anything else.
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
            msg = f"this is not a complete checkpoint: {explain_invalid(error)}"
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


def save_checkpoint(checkpoint: AgentCheckpoint, path: str | Path) -> Path:
    """Write a checkpoint to a JSON file, readable by its owner only; return the file's path.

    A file that was there is replaced as a whole. Raises `SerializationError` above 256 MiB and
    `ConfigurationError` where the file cannot be written.
    """
    data = checkpoint.to_json().encode()
    target = Path(path)
    if len(data) > LARGEST:
        msg = f"the checkpoint of run {checkpoint.run_id} has {len(data):,} bytes; {LARGEST:,} fit"
        raise SerializationError(msg)
    try:
        _replace(target, data)
    except OSError as error:
        msg = f"the checkpoint cannot be written to {target}: {error.strerror}; name another file"
        raise ConfigurationError(msg) from None
    return target


def load_checkpoint(path: str | Path) -> AgentCheckpoint:
    """Read a checkpoint from a file.

    Raises `ConfigurationError` where the file cannot be read, `SerializationError` where it
    holds no checkpoint that this version knows.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        msg = (
            f"the checkpoint {path} cannot be read: {error.strerror}; name the file that was saved"
        )
        raise ConfigurationError(msg) from None
    if len(data) > LARGEST:
        raise SerializationError(
            f"{path} is larger than {LARGEST:,} bytes, the limit of checkpoints"
        )
    return AgentCheckpoint.from_json(data)


class CheckpointFolder:
    """A folder that keeps the newest `keep` checkpoints of each run."""

    def __init__(self, path: str | Path, *, keep: int = 5) -> None:
        if keep < 1:
            raise ConfigurationError(f"field 'keep' is {keep}; keep 1 checkpoint or more")
        self.path = Path(path)
        self.keep = keep

    def save(self, checkpoint: AgentCheckpoint) -> Path:
        """Write one more checkpoint, and remove the run's oldest above the limit.

        Raises `ConfigurationError` as `save_checkpoint` does, and for a run id that cannot be
        part of a file's name: the writer of a checkpoint's file chooses the id in it.
        """
        name = f"{_checked(checkpoint.run_id)}-{len(checkpoint.steps):06d}.json"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            msg = f"the folder {self.path} cannot be made: {error.strerror}; name another one"
            raise ConfigurationError(msg) from None
        saved = save_checkpoint(checkpoint, self.path / name)
        for old in self.files(checkpoint.run_id)[: -self.keep]:
            old.unlink(missing_ok=True)
        return saved

    def files(self, run_id: str) -> list[Path]:
        """Return the files of a run's checkpoints, the oldest first.

        Raises `ConfigurationError` for a run id that cannot be part of a file's name.
        """
        name = re.compile(re.escape(_checked(run_id)) + _STEPS)
        if not self.path.is_dir():
            return []
        found = [path for path in self.path.iterdir() if name.fullmatch(path.name)]
        return sorted(found, key=lambda path: (len(path.name), path.name))

    def newest(self, run_id: str) -> AgentCheckpoint:
        """Return a run's newest checkpoint. Raises `ConfigurationError` if there is none."""
        files = self.files(run_id)
        if not files:
            msg = f"{self.path} has no checkpoint of run {run_id}; look for its folder"
            raise ConfigurationError(msg)
        return load_checkpoint(files[-1])


def _checked(run_id: str) -> str:
    if not _PLAIN.fullmatch(run_id):
        msg = (
            f"field 'run_id' is {run_id[:100]!r}, which cannot be part of a file's name; save this "
            "checkpoint with save_checkpoint, to a file that you name"
        )
        raise ConfigurationError(msg)
    return run_id


def _replace(target: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
