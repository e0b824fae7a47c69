"""The tools on offer, by name. Knows neither runs nor workers."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError, ToolNotFoundError
from stepfleet.orchestrator.records.tools import ToolSpec
from stepfleet.orchestrator.tools.definition import Tool, as_tool

_NAMED = 20


class ToolRegistry:
    """Tools by unique names, in the order in which they were registered."""

    def __init__(self) -> None:
        self._tools: dict[str, Tool[..., Any]] = {}
        self._specs: tuple[ToolSpec, ...] | None = None

    def process(self, tools: Iterable[Any]) -> "ToolRegistry":
        """Register each of `tools`: decorated functions and `ToolLike` objects, mixed."""
        for one in tools:
            self.register(one)
        return self

    def register(self, given: Any) -> Tool[..., Any]:
        """Add one tool and return it.

        Raises `ConfigurationError` for what is no tool, and for a name that is taken.
        """
        tool = as_tool(given)
        if tool.name in self._tools:
            raise ConfigurationError(
                f"tool {tool.name!r} is there twice; give one of them another name"
            )
        self._tools[tool.name] = tool
        self._specs = None
        return tool

    def specs(self) -> tuple[ToolSpec, ...]:
        """Return what a model is told of each tool."""
        if self._specs is None:
            self._specs = tuple(one.spec for one in self)
        return self._specs

    def get(self, name: str) -> Tool[..., Any]:
        """Return the tool called `name`. Raises `ToolNotFoundError` that names the close ones."""
        found = self._tools.get(name)
        if found is None:
            raise ToolNotFoundError(self._missing(name))
        return found

    async def execute(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Check `arguments` (JSON data) and run the tool called `name`; returns its value.

        Raises `ToolNotFoundError`, `ToolArgumentsError`, and whatever the tool raises.
        """
        return await self.get(name).execute(**arguments)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def __iter__(self) -> Iterator[Tool[..., Any]]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def _missing(self, name: str) -> str:
        close = difflib.get_close_matches(name[:200], self._tools, n=3)
        if close:
            hint = "did you mean " + " or ".join(repr(one) for one in close) + "?"
        elif self._tools:
            hint = "on offer: " + ", ".join(list(self._tools)[:_NAMED])
        else:
            hint = "no tools are on offer"
        return f"tool {name!r} does not exist; {hint}"


def registry_of(tools: Iterable[Any]) -> ToolRegistry:
    """Return a new registry of `tools`."""
    return ToolRegistry().process(tools)
