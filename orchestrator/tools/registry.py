"""The tools on offer, by name. Knows neither runs nor workers."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError, ToolNotFoundError
from stepfleet.orchestrator.records.calls.tools import ToolSpec
from stepfleet.orchestrator.tools.catalog import tool_catalog
from stepfleet.orchestrator.tools.definition import Tool, as_tool
from stepfleet.orchestrator.tools.mcp import McpServer
from stepfleet.orchestrator.tools.middleware import Middleware

_NAMED = 20


class ToolRegistry:
    """Tools by unique names, in the order in which they were registered.

    `middleware` goes around every call of a run's tools. `servers` have tools that only workers
    know; a registry with their tools is `late`: `listed()` is awaited before each look-up.
    """

    middleware: tuple[Middleware, ...] = ()
    servers: tuple[McpServer, ...] = ()
    late = False

    def __init__(self) -> None:
        self._tools: dict[str, Tool[..., Any]] = {}

    def process(self, tools: Iterable[Any]) -> "ToolRegistry":
        """Register each of `tools`: functions, `ToolLike` objects, references, servers, mixed.

        A reference is text: `module:attribute`, a package's module with tools, or the name of a
        tool in the catalog (`name`, `name@version`).
        """
        for one in tools:
            for found in tool_catalog().resolve(one) if isinstance(one, str) else (one,):
                if isinstance(found, McpServer):
                    self._add_server(found)
                else:
                    self.register(found)
        return self

    async def listed(self) -> None:
        """Return when all tools are known, those of servers included."""

    def digest_of(self, name: str) -> str | None:
        """Return the digest of a server's tool, None for all others."""
        del name
        return None

    def register(self, given: Any) -> Tool[..., Any]:
        """Add one tool and return it.

        Raises `ConfigurationError` for other objects, and for a name that is taken.
        """
        tool = as_tool(given)
        if tool.name in self._tools:
            raise ConfigurationError(
                f"tool {tool.name!r} is there twice; give one of them another name"
            )
        self._set_tools({**self._tools, tool.name: tool})
        return tool

    def specs(self) -> tuple[ToolSpec, ...]:
        """Return each tool as a model sees it."""
        return self._specs

    @cached_property
    def _specs(self) -> tuple[ToolSpec, ...]:
        return tuple(one.spec for one in self)

    @cached_property
    def queues(self) -> Mapping[str, str]:
        """The queues of the tools whose calls are tasks of their own, by the tools' names."""
        return {one.name: one.options.queue for one in self if one.options.queue}

    @cached_property
    def approvals(self) -> frozenset[str]:
        """The names of the tools whose calls may need a person's approval."""
        return frozenset(one.name for one in self if one.options.approval)

    @cached_property
    def instant(self) -> frozenset[str]:
        """The names of the tools whose calls are over at once."""
        return frozenset(one.name for one in self if one.instant)

    def get(self, name: str) -> Tool[..., Any]:
        """Return the tool called `name`. Raises `ToolNotFoundError` that names the close ones."""
        found = self._tools.get(name)
        if found is None:
            raise ToolNotFoundError(self._missing(name))
        return found

    async def execute(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Check `arguments` (JSON data) and run the tool called `name`; returns its value.

        Raises `ToolNotFoundError`, `ToolArgumentsError`, and all exceptions of the tool.
        """
        return await self.get(name).execute(**arguments)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def __iter__(self) -> Iterator[Tool[..., Any]]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def _set_tools(self, tools: dict[str, Tool[..., Any]]) -> None:
        self._tools = tools
        for cached in ("_specs", "queues", "approvals", "instant"):
            vars(self).pop(cached, None)

    def _add_server(self, server: McpServer) -> None:
        if any(one.name == server.name for one in self.servers):
            raise ConfigurationError(
                f"MCP server {server.name!r} is there twice; give one of them another name"
            )
        self.servers = (*self.servers, server)

    def _missing(self, name: str) -> str:
        close = difflib.get_close_matches(name[:200], self._tools, n=3)
        if close:
            hint = "did you mean " + " or ".join(repr(one) for one in close) + "?"
        elif self._tools:
            hint = "on offer: " + ", ".join(list(self._tools)[:_NAMED])
        else:
            hint = "no tools are on offer"
        return f"tool {name!r} does not exist; {hint}"


def tools_of(given: Iterable[Any]) -> tuple[Tool[..., Any], ...]:
    """Return tools, and those of references, as they are: several versions of one name too.

    Raises `ConfigurationError` for other objects, also for MCP servers.
    """
    catalog = tool_catalog()
    named = (catalog.resolve(one) if isinstance(one, str) else (one,) for one in given)
    return tuple(as_tool(one) for found in named for one in found)


def registry_of(tools: Iterable[Any]) -> ToolRegistry:
    """Return a new registry of `tools`."""
    return ToolRegistry().process(tools)
