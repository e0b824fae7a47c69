"""Finds the agents that a reference names: a module, a `.py` or `.toml` file, or several of them.

A TOML file has a table `[agents.NAME]` per agent, with the values of the environment over it.
Must not know its callers: the command line and the worker load agents alike.
"""

import importlib
import importlib.util
import os
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stepfleet.orchestrator.agents.agent import (
    CODE,
    FIELDS,
    Agent,
    from_environment,
    layered,
    with_limits_off,
)
from stepfleet.orchestrator.agents.builder import AgentBuilder
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.text.validation import meant
from stepfleet.orchestrator.references import load_file, load_module, load_reference, see_folder

_OPTION = "--agents"
TABLE = "agents"
SEVERAL = ("criteria", "special_tools", "middleware")
"""Fields that may name several objects, as a list."""
SUFFIX = ".toml"


def load_agents(reference: str | Iterable[str]) -> dict[str, Agent]:
    """Return the agents at the top level of the modules of `reference`, by name.

    `reference` is `package.module`, `path/to/file.py` or `path/to/agents.toml`, or several of
    them with commas between, or a list; agents in lists, tuples and dicts at the top level count
    as well. An empty list names no agents. Raises `ConfigurationError` that names file, line and
    cause where the code does not import, where it holds no agent, or two of one name.
    """
    parts = _parts(reference)
    if not parts:
        return {}
    reference = ",".join(parts)
    found: dict[str, Agent] = {}
    for part in parts:
        for agent in _agents_of(part):
            known = found.setdefault(agent.name, agent)
            if known is not agent:
                msg = f"{_OPTION} {reference}: two agents are named {agent.name!r}; rename one"
                raise ConfigurationError(msg)
    if not found:
        raise ConfigurationError(
            f"{_OPTION} {reference}: no agent there; assign one at the top level, "
            "as in solver = Agent('solver', model='openai:gpt-4o-mini')"
        )
    return found


def _agents_of(part: str) -> Iterable[Agent]:
    if "" not in sys.path:  # as `python -m` does; console scripts do not
        see_folder(str(Path.cwd()))
    _set_up_django()
    if part.endswith(SUFFIX):
        return agents_of_file(part).values()
    load = load_file if part.endswith(".py") or "/" in part else load_module
    return _agents_in(vars(load(part, _OPTION)).values())


def _set_up_django() -> None:
    """Set up a Django project that the environment names: its models import only after that.

    Celery and `manage.py` have done it in their own processes; while they do it, agents may be
    imported already. Raises `ConfigurationError` with the project's own error.
    """
    settings = os.environ.get("DJANGO_SETTINGS_MODULE")
    if not settings or importlib.util.find_spec("django") is None:
        return
    registry: Any = importlib.import_module("django.apps").apps
    if registry.ready or registry.loading:
        return
    try:
        importlib.import_module("django").setup()
    except Exception as error:
        msg = f"DJANGO_SETTINGS_MODULE={settings}: {type(error).__name__}: {error}"
        raise ConfigurationError(msg) from error


def _parts(reference: str | Iterable[str]) -> list[str]:
    if not isinstance(reference, str):
        return list(reference)
    parts = [part.strip() for part in reference.split(",") if part.strip()]
    if not parts:
        raise ConfigurationError(f"{_OPTION} is empty: name a module or a .py file with agents")
    return parts


def _agents_in(values: Iterable[Any]) -> Iterator[Agent]:
    for value in values:
        if isinstance(value, Agent):
            yield value
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, Agent))
        elif isinstance(value, Mapping):
            yield from (one for one in value.values() if isinstance(one, Agent))


def agents_of_file(
    file: str | Path, environment: Mapping[str, str] | None = None
) -> dict[str, Agent]:
    """Return the agents of a file, by name. `environment` replaces the process's own.

    Raises `ConfigurationError` that names the file, the field and the fix.
    """
    tables = _tables(Path(file))
    if not tables:
        raise ConfigurationError(f"{file}: no agent there; write a table such as [{TABLE}.solver]")
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
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from None
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
