"""What a running tool finds (its run, attempt, idempotency key), and what it may return.

Pure but for one context variable, which the executor sets around a tool's code.
"""

import contextlib
import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from pydantic import Field

from stepfleet.orchestrator.errors import ToolExecutionError
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.tools import ToolCall
from stepfleet.orchestrator.records.conversation.messages import Block
from stepfleet.orchestrator.tools.schemas.bounded_json import canonical_json


class ToolInvocation(Record):
    """One start of one tool call.

    `execution` and `step` count from 1, `index` is the call's place in its turn, from 0.
    `attempt` counts the starts of this call from 1. `idempotency_key` is the same for every
    attempt, so that a tool can hand it to a service that ignores repetitions. `deadline` is
    the UTC time at which the tool's timeout ends. `custom_state` is the run's before this step,
    for reading; a tool changes it by a `StateUpdate` that it returns. `metadata` is the run's own,
    `batch_id` and `line_id` are set for a run of a batch. `arguments` are the call's, as the model
    gave them, for a status hook; a tool has them already.
    """

    run_id: str
    execution: int
    step: int
    index: int
    call_id: str
    tool: str
    idempotency_key: str
    attempt: int = Field(default=1, ge=1)
    deadline: datetime | None = None
    custom_state: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    batch_id: str | None = None
    line_id: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def of(
        cls,
        call: ToolCall,
        *,
        run_id: str,
        execution: int,
        step: int,
        index: int,
        attempt: int = 1,
        custom_state: Mapping[str, Any] | None = None,
    ) -> "ToolInvocation":
        """Return the invocation of `call`, its idempotency key computed."""
        return cls.model_construct(
            run_id=run_id,
            execution=execution,
            step=step,
            index=index,
            call_id=call.id,
            tool=call.name,
            idempotency_key=_key(call, run_id, execution, step, index),
            attempt=attempt,
            # A copy: a tool's changes to it must not reach the run's state.
            custom_state=copy.deepcopy(dict(custom_state)) if custom_state else {},
        )

    def within(
        self, metadata: Mapping[str, Any], batch_id: str | None, line_id: str | None
    ) -> "ToolInvocation":
        """Return the invocation with the submitter's metadata and the place in its batch."""
        known = copy.deepcopy(dict(metadata)) if metadata else {}
        return self.model_copy(update={"metadata": known, "batch_id": batch_id, "line_id": line_id})

    def with_arguments_of(self, call: ToolCall) -> "ToolInvocation":
        """Return the invocation as a status hook gets it: with the arguments of its call."""
        return self.model_copy(update={"arguments": copy.deepcopy(call.arguments)})


def _key(call: ToolCall, run_id: str, execution: int, step: int, index: int) -> str:
    # The call's id is left out: a repeated request of the model may have another one.
    parts = [run_id, execution, step, index, call.name, call.arguments]
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:32]


_current: ContextVar[ToolInvocation] = ContextVar("stepfleet_tool_invocation")


def current_invocation() -> ToolInvocation:
    """Return the invocation whose tool is running here, in tasks and threads alike.

    Raises `ToolExecutionError` outside a tool call.
    """
    try:
        return _current.get()
    except LookupError:
        raise ToolExecutionError(
            "no tool call is running here; call current_invocation() inside a tool that a run "
            "executes"
        ) from None


def context_of(invocation: ToolInvocation) -> Context:
    """Return a copy of the current context in which `invocation` is the current one."""
    context = copy_context()
    context.run(_current.set, invocation)
    return context


@contextlib.contextmanager
def running(invocation: ToolInvocation) -> Iterator[None]:
    """Make `invocation` the current one while the block runs, as tests of a tool need it."""
    token = _current.set(invocation)
    try:
        yield
    finally:
        _current.reset(token)


@dataclass(frozen=True, slots=True)
class WithMedia:
    """A tool's result together with content blocks for the model.

    The blocks (`{"image": {"format": "png", "source": {"bytes": "<base64>"}}}`) stand in the tool's
    answer where the provider takes images there, else in a user message after the results of the
    turn. `result` and the blocks are bounded as any result is.
    """

    result: Any
    media: Sequence[Block] = ()


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """A tool's result together with entries of `AgentState.custom_state` that it sets.

    The entries replace those of the same name once the call's step is committed, later calls of
    a turn over earlier ones; both are JSON data. Tools of later steps find the state in
    `current_invocation().custom_state`.
    """

    result: Any
    custom_state: Mapping[str, Any] = field(default_factory=dict)


class CallStatus(Enum):
    """The outcome of a call whose worker was lost, as far as a status hook knows it.

    Members are not text, so that a result of the same words is never taken for one.
    """

    NOT_DONE = "not done"
    """It took no effect, and none is still to come: it is run (again)."""
    UNKNOWN = "unknown"
    """Nobody knows: it is not run again, and the model reads `OUTCOME_UNKNOWN`."""


@dataclass(frozen=True, slots=True)
class Done:
    """It was done, and returned `result`, None included."""

    result: Any = None
