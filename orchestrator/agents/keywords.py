"""The keyword arguments that stand for fields of `AgentConfig`, for editors and type checkers.

Names and types alone: `AgentConfig` validates the values and has the defaults.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from stepfleet.orchestrator.agents.planning.settings import Planning
from stepfleet.orchestrator.continuation.error_policy import ErrorPolicy
from stepfleet.orchestrator.events.broadcast.config import BroadcastConfig
from stepfleet.orchestrator.memory.policy import MemoryPolicy
from stepfleet.orchestrator.models.caching.policy import CachePolicy
from stepfleet.orchestrator.records.calls.answers import SubAgentLimits
from stepfleet.orchestrator.records.responses import ModelSettings

Fields = Mapping[str, Any]
"""A record by its fields."""


class _ForBoth(TypedDict, total=False):
    fallbacks: Iterable[str]
    instructions: str
    max_steps: int
    token_limit: int | None
    time_limit: float | None
    cumulative_timeout: float | None
    budget_usd: float | None
    error_policy: ErrorPolicy | Fields
    finish_reasons: Iterable[str]
    parallel_tool_execution: bool
    tool_choice: str
    parallel_tool_calls: bool | None
    model_attempts: int
    allow_empty_answer: bool
    settings: ModelSettings | Fields
    memory: MemoryPolicy | Fields
    cache: CachePolicy | Fields | bool | None
    user_template: str | None
    planning: Planning | Fields | None
    broadcast: BroadcastConfig | Fields | Literal["minimal", "standard", "debug"]
    require_final_answer: bool
    output_schema: dict[str, Any] | None
    answer_mode: Literal["tool", "native"]
    sub_agent_limits: SubAgentLimits | Fields


class RunOverrides(_ForBoth, total=False):
    """Changes of one run to its agent's configuration."""

    model: str | Sequence[str]


class AgentKeywords(_ForBoth, total=False):
    """Arguments of `Agent` beside its own."""

    prompt: str | None
    strategy_options: Mapping[str, Any]
    pricing: Mapping[str, Any]
    metadata: Mapping[str, Any]
