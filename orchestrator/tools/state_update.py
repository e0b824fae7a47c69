"""What a tool returns that also changes the run's custom state. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """A tool's result together with entries of `AgentState.custom_state` that it sets.

    The entries replace those of the same name once the call's step is committed, later calls of
    a turn over earlier ones; both are JSON data. Tools of later steps find the state in
    `current_invocation().custom_state`.
    """

    result: Any
    custom_state: Mapping[str, Any] = field(default_factory=dict)
