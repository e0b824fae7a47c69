"""Merges an agent's fields from file, environment and code: the later layer wins. Pure.

Tables are merged field by field; everything else is replaced as a whole.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, get_args

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.continuation.error_policy import ErrorPolicy
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.text.validation import meant

PREFIX = "STEPFLEET_AGENT__"
"""`STEPFLEET_AGENT__SOLVER__MAX_STEPS` is the field `max_steps` of the agent `solver`."""
NONE = "none"
"""Switches a limit off, in a file and in the environment."""
POLICIES = ("stop_on_any_error", "retry_tool_errors", "ignore_tool_errors", "retry_all")
CODE = ("output_type", "criteria", "context", "subscribers", "special_tools", "middleware")
"""Arguments of `Agent` that a file names as `module:attribute`."""
TEXTS = ("instructions", "prompt", "user_template")
"""Fields whose text may begin with a bracket."""
FIELDS = frozenset(AgentConfig.model_fields) - {"name"} | {*CODE, "earlier_tools", "handoffs"}


def layered(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, `second` winning; where both are tables, field by field."""
    merged = dict(first)
    for name, value in second.items():
        before = _table(merged.get(name))
        if before is not None and isinstance(value, Mapping):
            merged[name] = layered(before, value)
        else:
            merged[name] = value
    return merged


def prefix_of(agent: str) -> str:
    """Return the prefix of an agent's variables."""
    return f"{PREFIX}{re.sub(r'[^A-Z0-9]', '_', agent.upper())}__"


def from_environment(name: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the agent `name` in the environment, in the form of a file's table.

    Values are text, JSON where they begin with a bracket, or `none`. Raises `ConfigurationError`
    that names the variable.
    """
    prefix = prefix_of(name)
    found: dict[str, Any] = {}
    for variable in sorted(one for one in environment if one.startswith(prefix)):
        path = variable.removeprefix(prefix).lower().split("__")
        if path[0] not in FIELDS:
            close = meant(path[0], FIELDS) or "; docs/configuration.md lists them"
            msg = f"{variable}: an agent has no field {path[0]!r}{close}"
            raise ConfigurationError(msg)
        text = environment[variable]
        value: Any = text if path[0] in TEXTS else _value(variable, text)
        for part in reversed(path):
            value = {part: value}
        found = layered(found, value)
    return found


def with_limits_off(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's fields with `none` in the place of numbers read as no limit."""
    return {
        name: None if value == NONE and _may_be_none(name) else value
        for name, value in fields.items()
    }


def with_presets(agent: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with an error policy that is named by its preset made a policy.

    Raises `ConfigurationError` for an unknown name.
    """
    policy = fields.get("error_policy")
    if isinstance(policy, str):
        policy = {"preset": policy}
    if not isinstance(policy, Mapping) or "preset" not in policy:
        return dict(fields)
    rest = {name: value for name, value in policy.items() if name != "preset"}
    if policy["preset"] not in POLICIES:
        raise ConfigurationError(
            f"agent {agent!r}: field 'error_policy': {policy['preset']!r} is no preset; write one "
            f"of {', '.join(POLICIES)}"
        )
    made: ErrorPolicy = getattr(ErrorPolicy, policy["preset"])()
    return {**fields, "error_policy": {**made.model_dump(), **rest}}


def _value(variable: str, text: str) -> Any:
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{variable} is no valid JSON: {error}") from None


def _table(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, Record):
        return value.model_dump(exclude_unset=True)
    return value if isinstance(value, Mapping) else None


def _may_be_none(name: str) -> bool:
    known = AgentConfig.model_fields.get(name)
    kinds = get_args(known.annotation) if known else ()
    return type(None) in kinds and str not in kinds
