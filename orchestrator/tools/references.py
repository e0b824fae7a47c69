"""Finds tools by `module:attribute` or `module`. Runs the user's code; errors name the fix."""

import importlib
from collections.abc import Iterator
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.tools.definition import Tool, ToolLike, as_tool


def referred(reference: str) -> Any:
    """Return the object that `module:attribute` names, or the module of `module` alone.

    Raises `ConfigurationError` that names the part that is not there.
    """
    name, _, path = reference.partition(":")
    try:
        found: Any = importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"tool {reference!r}: module {name!r} cannot be imported ({error}); install it where "
            "agents are defined, and on all workers"
        ) from error
    except Exception as error:
        raise ConfigurationError(
            f"tool {reference!r}: module {name!r} fails at its import: "
            f"{type(error).__name__}: {error}"
        ) from error
    for attribute in path.split(".") if path else ():
        if not hasattr(found, attribute):
            raise ConfigurationError(
                f"tool {reference!r}: {name!r} has no {path!r}; write module:attribute"
            )
        found = getattr(found, attribute)
    return found


def tools_in(found: Any, named: str) -> list[Tool[..., Any]]:
    """Return the tools that an object is or holds: a tool, a list of them, or a module.

    Raises `ConfigurationError` where it holds none; `named` says where it came from.
    """
    tools = list(_tools(found))
    if not tools:
        raise ConfigurationError(f"{named}: no tool there; put @tool above a function")
    return tools


def _tools(found: Any) -> Iterator[Tool[..., Any]]:
    if isinstance(found, list | tuple):
        yield from (as_tool(one) for one in found)
    elif isinstance(found, Tool) or (isinstance(found, ToolLike) and not isinstance(found, type)):
        yield as_tool(found)
    elif type(found).__name__ == "module":
        own = {id(one): one for one in vars(found).values() if isinstance(one, Tool)}
        yield from own.values()
    else:
        yield as_tool(found)
