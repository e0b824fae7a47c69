"""Finds the agents that a reference names: a module, a `.py` or `.toml` file, or several of them.

Runs the user's code, and turns whatever goes wrong there into one message that names file and
line. Must not know who asks: the command line and the worker load agents alike.
"""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.files import SUFFIX, agents_of_file
from stepfleet.orchestrator.errors import ConfigurationError

_OURS = str(Path(__file__).resolve().parents[1])


def load_agents(reference: str | Iterable[str]) -> dict[str, Agent]:
    """Return the agents at the top level of what `reference` names, by name.

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
                msg = f"--agents {reference}: two agents are named {agent.name!r}; rename one"
                raise ConfigurationError(msg)
    if not found:
        msg = (
            f"--agents {reference}: no agent there; assign one at the top level, "
            "as in solver = Agent('solver', model='openai:gpt-4o-mini')"
        )
        raise ConfigurationError(msg)
    return found


def _agents_of(part: str) -> Iterable[Agent]:
    if part.endswith(SUFFIX):
        _see_working_directory()
        return agents_of_file(part).values()
    return _agents_in(vars(_load(part)).values())


def _parts(reference: str | Iterable[str]) -> list[str]:
    if not isinstance(reference, str):
        return list(reference)
    parts = [part.strip() for part in reference.split(",") if part.strip()]
    if not parts:
        raise ConfigurationError("--agents is empty: name a module or a .py file with agents")
    return parts


def _agents_in(values: Iterable[Any]) -> Iterator[Agent]:
    for value in values:
        if isinstance(value, Agent):
            yield value
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, Agent))
        elif isinstance(value, Mapping):
            yield from (one for one in value.values() if isinstance(one, Agent))


def _load(reference: str) -> ModuleType:
    _see_working_directory()
    if reference.endswith(".py") or "/" in reference:
        return _load_file(reference)
    try:
        return importlib.import_module(reference)
    except ModuleNotFoundError as error:
        if error.name and (reference == error.name or reference.startswith(f"{error.name}.")):
            msg = (
                f"--agents {reference}: there is no module {error.name!r} here or on the Python "
                "path; name a module or a .py file, relative to the working directory"
            )
            raise ConfigurationError(msg) from None
        raise _failed(reference, None, error) from error
    except (Exception, SystemExit) as error:
        raise _failed(reference, None, error) from error


def _load_file(reference: str) -> ModuleType:
    path = Path(reference).expanduser().resolve()
    if not path.is_file():
        raise ConfigurationError(f"--agents {reference}: there is no such file")
    # A name of its own: `math.py` with agents must not become the module `math`.
    name = f"agents_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"--agents {reference}: not a Python file (.py)")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(reference, path, error) from error
    return module


def _see_working_directory() -> None:
    """Let modules beside the user be found, as `python -m` does; console scripts do not."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _failed(reference: str, path: Path | None, error: BaseException) -> ConfigurationError:
    said = str(error) if isinstance(error, ConfigurationError) else f"{_kind(error)}{error}"
    return ConfigurationError(f"--agents {reference} does not import: {_place(path, error)}{said}")


def _kind(error: BaseException) -> str:
    return f"{type(error).__name__}: "


def _place(path: Path | None, error: BaseException) -> str:
    """Return `file, line N: ` of the user's own line that led to the error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: "
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        frame
        for frame in frames
        if not frame.filename.startswith(("<frozen", _OURS)) and "/importlib/" not in frame.filename
    ]
    own = [frame for frame in theirs if path is not None and frame.filename == str(path)]
    for frame in reversed(own or theirs):
        return f"{frame.filename}, line {frame.lineno}: "
    return ""
