"""The storable configuration of an agent: what a run keeps for as long as it lives."""

import hashlib
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Self

from pydantic import Field, ValidationError

from stepfleet.orchestrator.error_policy import ErrorPolicy
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.responses import ModelSettings
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.validation import explain_invalid

NOT_PER_RUN = (
    "name",
    "tools",
    "settings.base_url",
    "settings.api_key_env",
    "settings.organization",
    "settings.extra_body",
)


class ToolRef(Record):
    """A tool by name and version, as a run's configuration remembers it."""

    name: str
    version: str = "1"


class AgentConfig(Record):
    """The storable part of an agent.

    `time_limit` and `cumulative_timeout` are seconds (the second replaces the first),
    `token_limit` tokens, `budget_usd` US dollars, each per execution; None switches a limit
    off. `model_attempts` bounds how often one step's model call is tried.
    """

    name: str = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][\w.\- ]*$")
    model: str = Field(min_length=1)
    instructions: str = ""
    tools: tuple[ToolRef, ...] = ()
    max_steps: int = Field(default=10, ge=1)
    token_limit: int | None = Field(default=32_768, ge=1)
    time_limit: float | None = Field(default=300.0, gt=0)
    cumulative_timeout: float | None = Field(default=None, gt=0)
    budget_usd: float | None = Field(default=None, gt=0)
    error_policy: ErrorPolicy = ErrorPolicy()
    finish_reasons: tuple[FinishReason, ...] = ()
    parallel_tool_execution: bool = False
    tool_choice: str = "auto"
    parallel_tool_calls: bool | None = None
    model_attempts: int = Field(default=5, ge=1, le=100)
    settings: ModelSettings = ModelSettings()
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The configuration's content address (hex)."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    def with_overrides(self, overrides: Mapping[str, Any]) -> Self:
        """Return the configuration with some fields changed; `settings` field by field.

        Raises `ConfigurationError` that names the field when one is unknown or invalid, or may
        not be set per run: whoever may submit a line must not choose where keys are sent.
        """
        if not overrides:
            return self
        merged = {**self.settings.model_dump(), **overrides.get("settings", {})}
        try:
            changed = type(self).model_validate(
                {**self.model_dump(), **overrides, "settings": merged}
            )
        except ValidationError as error:
            raise ConfigurationError(explain_invalid(error)) from None
        for name in NOT_PER_RUN:
            if attrgetter(name)(changed) != attrgetter(name)(self):
                msg = f"field {name!r} cannot be overridden per run; define another agent for that"
                raise ConfigurationError(msg)
        return changed
