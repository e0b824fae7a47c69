"""How deep JSON data may be nested. Pure; knows nothing of what the data are for.

What reads and writes records gives up at 200 levels and more, with errors of its own. So data that
come in are refused long before, by a message that names the field.
"""

from collections.abc import Mapping
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError

MAX_LEVELS = 100
READABLE_LEVELS = 200
"""What earlier versions have stored is read where it can be written again."""


def check_nesting(value: Any, field: str) -> None:
    """Raise `ConfigurationError` that names the field where it has more than 100 levels."""
    if is_too_deep(value):
        msg = f"field {field!r} is nested deeper than {MAX_LEVELS} levels; flatten it"
        raise ConfigurationError(msg)


def is_too_deep(value: Any, levels: int = MAX_LEVELS) -> bool:
    """Return whether a value has more levels; one that holds itself has."""
    level = [value]
    for _ in range(levels):
        # By their identity: what stands in many places is looked into once per level.
        level = list({id(child): child for one in level for child in _children(one)}.values())
        if not level:
            return False
    return any(isinstance(one, Mapping | list | tuple) for one in level)


def _children(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
