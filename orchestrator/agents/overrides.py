"""A run's own changes to its agent's configuration: checked, and in the form that is stored. Pure.

`settings` and `error_policy` may name a few of their fields; the agent's others stay.
"""

from collections.abc import Mapping
from typing import Any

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.agents.keywords import RunOverrides
from stepfleet.orchestrator.agents.strategies.lookup import json_strategy
from stepfleet.orchestrator.errors import ConfigurationError, SerializationError
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.text.validation import meant
from stepfleet.orchestrator.tools.schemas.bounded_json import (
    READABLE_LEVELS,
    check_nesting,
    is_too_deep,
)

_IN_PARTS = "settings"
_OF_MODELS = frozenset({"model", "fallbacks", "memory", "settings", "parallel_tool_calls"})

_OF_RUNS = frozenset(
    {"max_steps", "token_limit", "time_limit", "cumulative_timeout", "budget_usd", "error_policy"}
) | {"broadcast"}


def limits_of(config: AgentConfig, unlike: AgentConfig | None = None) -> dict[str, Any]:
    """Return the fields that stay a run's own where another agent goes on with it, as stored.

    Those alone that differ in `unlike`, if that is given.
    """
    names = {
        name
        for name in _OF_RUNS
        if unlike is None or getattr(config, name) != getattr(unlike, name)
    }
    return config.model_dump(mode="json", include=names)


def stored_overrides(config: AgentConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` as JSON data that `config.with_overrides` takes.

    Raises `ConfigurationError` that names the field when one is unknown or invalid.
    """
    if not given:
        return {}
    for name, value in given.items():
        check_nesting(value, name)
    wanted = {name: _whole(config, name, value) for name, value in given.items()}
    changed = config.with_overrides(wanted)
    changed.check_storable()
    if not _OF_MODELS.isdisjoint(given):
        changed.check_models()
    if "tool_choice" in given:
        changed.check_tool_choice(json_strategy(config.strategy, config.strategy_options))
    # A run's own model is called without the fallbacks of its agent.
    stored = {*given, "fallbacks"} if "model" in given and changed.fallbacks else set(given)
    plain = changed.model_dump(mode="json", include=stored)
    if _IN_PARTS in plain:
        plain[_IN_PARTS] = {name: plain[_IN_PARTS][name] for name in wanted[_IN_PARTS]}
    return plain


_NAMES = frozenset(RunOverrides.__annotations__) | {"metadata"}


def named_overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides whose names come from outside, as keywords of a call.

    Raises `ConfigurationError` for a name that is none: it might be another keyword of that call.
    """
    for name in given:
        if name in _NAMES:
            continue
        if name in AgentConfig.model_fields:
            msg = f"field {name!r} cannot be overridden per run; define another agent for that"
        else:
            msg = (
                f"field {ascii(name)[:60]} is not known{meant(name, _NAMES)}; write fields of the "
                "agent's configuration, as max_steps"
            )
        raise ConfigurationError(msg)
    return dict(given)


def with_stored_overrides(config: AgentConfig, stored: str | None) -> AgentConfig:
    """Return an agent's configuration with the overrides that a run's header holds.

    Raises `SerializationError` as `read_overrides` does.
    """
    return config.with_overrides(read_overrides(stored)) if stored else config


def read_overrides(stored: str | None) -> dict[str, Any]:
    """Return the overrides that a run's header holds.

    Raises `SerializationError` for other data than a version of ours has stored.
    """
    if not stored:
        return {}
    try:
        found = exact_json.loads(stored)
    except ValueError as error:
        raise SerializationError(f"the run's overrides cannot be read: {error}") from None
    if not isinstance(found, dict) or is_too_deep(found, READABLE_LEVELS):
        raise SerializationError(
            "the run's overrides cannot be read: no object, or nested too deep"
        )
    return found


def merged_overrides(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored overrides in which `second` wins, field by field of the settings too."""
    if "model" in second:
        first = {name: value for name, value in first.items() if name != "fallbacks"}
    merged = {**first, **second}
    if _IN_PARTS in first and _IN_PARTS in second:
        merged[_IN_PARTS] = {**first[_IN_PARTS], **second[_IN_PARTS]}
    return merged


def _whole(config: AgentConfig, name: str, value: Any) -> Any:
    """Return a value in the form that the configuration takes."""
    if name == _IN_PARTS:
        if isinstance(value, Record):
            return value.model_dump(exclude_unset=True)
        if not isinstance(value, Mapping):
            raise ConfigurationError(f"field {name!r} is no object; write its fields and values")
        return dict(value)
    current = getattr(config, name, None)
    if isinstance(current, Record) and isinstance(value, Mapping):
        return {**current.model_dump(), **value}
    return value
