"""What a tool returns that also shows the model images or documents. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepfleet.orchestrator.records.messages import Block


@dataclass(frozen=True, slots=True)
class WithMedia:
    """A tool's result together with content blocks that the model is shown.

    Providers take no images in a tool's answer: the blocks (`{"image": {"format": "png",
    "source": {"bytes": "<base64>"}}}`, see `records.blocks`) stand in a user message behind the
    results of the turn. `result` and the blocks are bounded as any result is.
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
