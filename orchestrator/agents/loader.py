"""Finds the agents that a reference names: a module, a `.py` or `.toml` file, or several of them.

Must not know its callers: the command line and the worker load agents alike.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.files import SUFFIX, agents_of_file
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.references import load_file, load_module, see_folder

_OPTION = "--agents"


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
    if part.endswith(SUFFIX):
        return agents_of_file(part).values()
    load = load_file if part.endswith(".py") or "/" in part else load_module
    return _agents_in(vars(load(part, _OPTION)).values())


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
