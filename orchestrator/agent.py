"""An agent in code: its configuration, and what cannot be stored: tools, criteria, models.

A run stores the configuration it started with; workers find the code by the agent's name.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from stepfleet.orchestrator.config import AgentConfig, ToolRef
from stepfleet.orchestrator.continuation import (
    CanDecideToContinue,
    ContinuationCriteria,
    base_criteria,
)
from stepfleet.orchestrator.error_policy import ErrorContextResolver, ErrorPolicy, resolve
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models import LLM
from stepfleet.orchestrator.tools import ToolRegistry, registry_of
from stepfleet.orchestrator.validation import explain_invalid

CUSTOM_MODEL = "custom:"


@dataclass(frozen=True, init=False)
class Agent:
    """An agent as code: a configuration, its tools, and its further criteria.

    Every field of `AgentConfig` is a keyword argument. `model` is a `provider:name` string or
    an object with the `LLM` protocol. `criteria` are appended to the base set. Raises
    `ConfigurationError` that names the field and the fix.
    """

    config: AgentConfig
    tools: ToolRegistry
    criteria: tuple[CanDecideToContinue, ...] = ()
    llm: LLM | None = None
    failures: ErrorContextResolver | None = None

    def __init__(
        self,
        name: str,
        *,
        model: str | LLM,
        tools: Iterable[Any] = (),
        criteria: Iterable[CanDecideToContinue] = (),
        failures: ErrorContextResolver | None = None,
        **config: Any,
    ) -> None:
        registry = registry_of(tools)
        custom = not isinstance(model, str)
        fields = {
            "name": name,
            "model": f"{CUSTOM_MODEL}{type(model).__name__}" if custom else model,
            "tools": tuple(
                ToolRef(name=one.name, version=str(getattr(one, "version", "1")))
                for one in registry
            ),
            **config,
        }
        try:
            stored = AgentConfig.model_validate(fields)
        except ValidationError as error:
            raise ConfigurationError(f"agent {name!r}: {explain_invalid(error)}") from None
        _check_tool_choice(stored)
        for attribute, value in (
            ("config", stored),
            ("tools", registry),
            ("criteria", tuple(criteria)),
            ("llm", model if custom else None),
            ("failures", failures),
        ):
            object.__setattr__(self, attribute, value)

    @property
    def name(self) -> str:
        """The name under which workers and batches find this agent."""
        return self.config.name

    def with_error_policy(self, policy: ErrorPolicy) -> "Agent":
        """Return a copy that follows `policy`."""
        return self._with(error_policy=policy)

    def with_cumulative_timeout(self, seconds: float) -> "Agent":
        """Return a copy whose steps may take `seconds` in all; replaces the wall-clock limit."""
        return self._with(cumulative_timeout=seconds)

    def _with(self, **overrides: Any) -> "Agent":
        changed = replace_frozen(self, config=self.config.with_overrides(overrides))
        _check_tool_choice(changed.config)
        return changed


def replace_frozen(agent: Agent, **changes: Any) -> Agent:
    """Return a copy of `agent` with some attributes changed, its constructor not run again."""
    copied = object.__new__(Agent)
    for name in ("config", "tools", "criteria", "llm", "failures"):
        object.__setattr__(copied, name, changes.get(name, getattr(agent, name)))
    return copied


def criteria_of(config: AgentConfig, agent: Agent | None = None) -> ContinuationCriteria:
    """Return the criteria of a run: the base set with the configured limits, then the agent's."""
    return base_criteria(
        max_steps=config.max_steps,
        token_limit=config.token_limit,
        time_limit=config.time_limit,
        cumulative_timeout=config.cumulative_timeout,
        budget_usd=config.budget_usd,
        error_policy=config.error_policy,
        finish_reasons=config.finish_reasons,
        resolver=agent.failures or resolve if agent else resolve,
        extra=agent.criteria if agent else (),
    )


def _check_tool_choice(config: AgentConfig) -> None:
    names = [one.name for one in config.tools]
    if config.tool_choice not in {"auto", "any", "none", *names}:
        msg = (
            f"agent {config.name!r}: tool_choice {config.tool_choice!r} is neither auto, any, none "
            f"nor one of its tools ({', '.join(names) or 'it has none'})"
        )
        raise ConfigurationError(msg)
