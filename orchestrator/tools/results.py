"""Values that a tool or its status hook returns beside plain results. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from stepfleet.orchestrator.records.conversation.messages import Block


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

    Members are no text, so that a result of the same words is never taken for one.
    """

    NOT_DONE = "not done"
    """It took no effect, and none is still to come: it is run (again)."""
    UNKNOWN = "unknown"
    """Nobody knows: it is not run again, and the model reads `OUTCOME_UNKNOWN`."""


@dataclass(frozen=True, slots=True)
class Done:
    """It was done, and returned `result`, None included."""

    result: Any = None
