"""The tools of an agent by name, and all tools of a process by name and version.

Old versions stay in the catalog for runs that began with them. Tools of installed packages are
found by their entry points in the group `stepfleet.tools`, at the first name that is not known
otherwise. Knows neither runs nor workers.
"""

import difflib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from packaging.version import InvalidVersion, Version

from stepfleet.orchestrator.errors import ConfigurationError, ToolNotFoundError
from stepfleet.orchestrator.records.calls.tools import ToolSpec
from stepfleet.orchestrator.references import load_reference
from stepfleet.orchestrator.tools.definition import Tool, ToolLike, as_tool
from stepfleet.orchestrator.tools.mcp import McpServer
from stepfleet.orchestrator.tools.middleware import Middleware

log = logging.getLogger(__name__)

GROUP = "stepfleet.tools"
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
                f"tool {tool.name!r} appears twice; give one of them another name"
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
                f"MCP server {server.name!r} appears twice; give one of them another name"
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


def _installed() -> Iterable[EntryPoint]:
    return entry_points(group=GROUP)


class ToolCatalog:
    """Tools by name and version. `installed` returns the entry points of installed packages."""

    def __init__(self, installed: Callable[[], Iterable[EntryPoint]] = _installed) -> None:
        self._tools: dict[str, dict[str, Tool[..., Any]]] = {}
        self._installed = installed
        self._discovered = False
        self._packages: dict[tuple[str, str], str] = {}

    def register(self, given: Any) -> Tool[..., Any]:
        """Add a tool under its name and version, and return it; adding it again changes nothing.

        Raises `ConfigurationError` where another tool has that name and version.
        """
        tool = as_tool(given)
        known = self._tools.setdefault(tool.name, {}).setdefault(tool.version, tool)
        if known is not tool:
            raise ConfigurationError(
                f"tool {tool.name!r} is in the catalog with version {tool.version!r} already; "
                "give this one another version"
            )
        return tool

    def find(self, name: str, version: str | None = None) -> Tool[..., Any] | None:
        """Return the tool with that version, or the newest one; None if unknown."""
        found = self._known(name, version)
        if found is None and not self._discovered:
            self.discover()
            found = self._known(name, version)
        return found

    def get(self, name: str, version: str | None = None) -> Tool[..., Any]:
        """Return the result of `find`. Raises `ConfigurationError` that lists the known ones."""
        found = self.find(name, version)
        if found is None:
            there = ", ".join(self.versions(name))
            known = f"versions {there}" if there else f"tools {', '.join(self.names()) or 'none'}"
            wanted = f"{name}@{version}" if version else name
            raise ConfigurationError(
                f"tool {wanted!r} is not in the catalog (it has: {known}); register it, install "
                f"the package that offers it under {GROUP!r}, or write module:attribute"
            )
        return found

    def beside(self, tool: Tool[..., Any], version: str) -> Tool[..., Any] | None:
        """Return another version of `tool`: one that code registered, or of the same package.

        A tool of another package that happens to have its name is none.
        """
        found = self.find(tool.name, version)
        if found is None:
            return None
        package = self._packages.get((tool.name, version))
        same = package == self._packages.get((tool.name, tool.version))
        return found if package is None or same else None

    def versions(self, name: str) -> tuple[str, ...]:
        """Return the versions of a tool, the oldest first."""
        return tuple(sorted(self._tools.get(name, {}), key=_order))

    def names(self) -> tuple[str, ...]:
        """Return the names of all tools, sorted."""
        return tuple(sorted(self._tools))

    def discover(self) -> tuple[Tool[..., Any], ...]:
        """Register the tools of installed packages, and return them.

        A package whose tools cannot be loaded is logged, and keeps no others out.
        """
        self._discovered = True
        found: list[Tool[..., Any]] = []
        for point in self._installed():
            try:
                offered = _tools_in(point.load(), f"entry point {point.name!r} of {GROUP!r}")
                for one in offered:
                    known = self._known(one.name, one.version)
                    found.append(self.register(one))
                    if known is None:
                        self._packages[one.name, one.version] = _package(point)
            except Exception as error:  # noqa: BLE001 - foreign packages
                log.warning("tools of %s cannot be used: %s", point.value, error)
        return tuple(found)

    def resolve(self, reference: str) -> list[Tool[..., Any]]:
        """Return the tools of `name`, `name@version`, `module:attribute` or `package.module`.

        Raises `ConfigurationError` where there are none.
        """
        if ":" in reference or "." in reference.partition("@")[0]:
            return _tools_in(load_reference(reference, "field 'tools'"), f"tool {reference!r}")
        name, _, version = reference.partition("@")
        return [self.get(name, version or None)]

    def _known(self, name: str, version: str | None) -> Tool[..., Any] | None:
        versions = self._tools.get(name, {})
        if version is None:
            return versions[max(versions, key=_order)] if versions else None
        return versions.get(version)


def _package(point: EntryPoint) -> str:
    """Return the distribution of an entry point, or else the package of its module."""
    return point.dist.name if point.dist else point.value.partition(":")[0].partition(".")[0]


@cache
def tool_catalog() -> ToolCatalog:
    """Return this process's catalog, made at the first call."""
    return ToolCatalog()


def _tools_in(found: Any, named: str) -> list[Tool[..., Any]]:
    """Return the tools that an object is or holds: a tool, a list of them, or a module.

    Raises `ConfigurationError` where it holds none; `named` is its source.
    """
    tools = list(_tools(found))
    if not tools:
        raise ConfigurationError(f"{named}: no tool there; put @tool above a function")
    return tools


def _tools(found: Any) -> Iterator[Tool[..., Any]]:
    if isinstance(found, list | tuple):
        yield from (as_tool(one) for one in found)
    elif isinstance(found, ModuleType) and not isinstance(found, ToolLike):
        yield from {id(one): one for one in vars(found).values() if isinstance(one, Tool)}.values()
    else:
        yield as_tool(found)


def _order(version: str) -> tuple[int, Any]:
    try:
        return 1, Version(version)
    except InvalidVersion:
        return 0, version
