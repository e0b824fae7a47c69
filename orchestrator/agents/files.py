"""Agents of a TOML file: tables `[agents.NAME]`, with the values of the environment over them.

Reads the file and imports the code that it names; `layers` merges the layers.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.builder import AgentBuilder
from stepfleet.orchestrator.agents.layers import (
    CODE,
    FIELDS,
    from_environment,
    layered,
    with_limits_off,
)
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.text.validation import meant
from stepfleet.orchestrator.references import load_reference, see_folder

TABLE = "agents"
SEVERAL = ("criteria", "special_tools", "middleware")
"""Fields that may name several objects, as a list."""
SUFFIX = ".toml"


def agents_of_file(
    file: str | Path, environment: Mapping[str, str] | None = None
) -> dict[str, Agent]:
    """Return the agents of a file, by name. `environment` replaces the process's own.

    Raises `ConfigurationError` that names the file, the field and the fix.
    """
    tables = _tables(Path(file))
    if not tables:
        raise ConfigurationError(f"{file}: no agent there; write a table as [{TABLE}.solver]")
    return {name: _built(file, name, environment) for name in tables}


def builder_of(
    name: str, file: str | Path | None = None, environment: Mapping[str, str] | None = None
) -> AgentBuilder:
    """Return a builder that begins with the agent's table in `file`, and the environment over it.

    Without a file, with the environment alone; `environment` replaces the process's own. Raises
    `ConfigurationError` that names the file or the variable, and the fix.
    """
    table: dict[str, Any] = {}
    if file is not None:
        tables = _tables(Path(file))
        if name not in tables:
            known = ", ".join(tables) or "none"
            raise ConfigurationError(f"{file}: no table [{TABLE}.{name}]; agents there: {known}")
        table = tables[name]
        if unknown := sorted(set(table) - FIELDS):
            close = meant(unknown[0], FIELDS)
            msg = f"{file}: [{TABLE}.{name}]: field {unknown[0]!r} is not known{close}"
            raise ConfigurationError(msg)
        see_folder(str(Path(file).resolve().parent))
    own = from_environment(name, os.environ if environment is None else environment)
    fields = with_limits_off(layered(table, own))
    code = {one: _code(one, fields[one]) for one in CODE if one in fields}
    return AgentBuilder(name, {**fields, **code})


def _built(file: str | Path, name: str, environment: Mapping[str, str] | None) -> Agent:
    try:
        return builder_of(name, file, environment).build()
    except ConfigurationError as error:
        text = error.message
        raise ConfigurationError(text if str(file) in text else f"{file}: {text}") from None


def _tables(path: Path) -> dict[str, dict[str, Any]]:
    try:
        with path.open("rb") as file:
            whole = tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; name a file with agents") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is no TOML: {error}") from None
    tables = whole.get(TABLE, {})
    if not isinstance(tables, dict) or not all(isinstance(one, dict) for one in tables.values()):
        raise ConfigurationError(f"{path}: {TABLE!r} holds tables alone, as [{TABLE}.solver]")
    return tables


def _code(field: str, value: Any) -> Any:
    """Return the objects that a field references; a schema that is written out stays as it is."""
    if field == "output_type" and isinstance(value, dict):
        return value
    references = value if isinstance(value, list) and field in SEVERAL else [value]
    if not all(isinstance(one, str) for one in references):
        raise ConfigurationError(f"field {field!r} names code: write 'module:attribute'")
    found = tuple(load_reference(one, f"field {field!r}") for one in references)
    return found if field in SEVERAL else found[0]
