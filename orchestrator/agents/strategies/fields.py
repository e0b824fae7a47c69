"""Reads the loose fields of a model's JSON object. Pure; nothing here raises."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stepfleet.orchestrator.records.tools import ToolCall


def text_field(parsed: Mapping[str, Any], name: str) -> str:
    """Return a field as text: "" where it is missing, JSON where it is no text."""
    value = parsed.get(name)
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def says_yes(value: Any) -> bool:
    """Return whether a field means true; models write it as a text as well."""
    return value is True or (isinstance(value, str) and value.strip().lower() in {"true", "yes"})


def action_of(calls: Sequence[ToolCall]) -> Any:
    """Return the calls as a history keeps them: None, the only one, or a list."""
    actions = [{"tool": call.name, "arguments": call.arguments} for call in calls]
    if len(actions) > 1:
        return actions
    return actions[0] if actions else None
