"""An agent's tools together with those of its MCP servers, as these list them.

Decides names and options; calling a server is its session's business. The same listings give the
same names on every worker: nothing depends on which server answered first.
"""

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from stepfleet.orchestrator.tools import Tool, ToolOptions, ToolRegistry, current_invocation
from stepfleet.orchestrator.tools.mcp import McpServer
from stepfleet.orchestrator.tools.schemas.checks import checker_of
from stepfleet.worker.toolbox.mcp.content import value_of
from stepfleet.worker.toolbox.mcp.listing import Definition
from stepfleet.worker.toolbox.mcp.session import Session

IDEMPOTENCY_KEY = "stepfleet/idempotency-key"
"""Where a call's `_meta` has the key that is the same for every attempt at the call."""


_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST = 64
_DIGEST = 8

Named = tuple[str, str]
"""A server's name and its own name of one of its tools."""


class ListedTools(ToolRegistry):
    """Tools of which some are known once their servers have listed them: await `listed()` first."""

    late = True

    def __init__(
        self, own: ToolRegistry, sessions: Sequence[Session], reserved: Iterable[str] = ()
    ) -> None:
        super().__init__()
        self.process(own)
        self.middleware = own.middleware
        self._own = tuple(own)
        self._sessions = tuple(sessions)
        self._reserved = frozenset(reserved) | {one.name for one in own}
        self._digested: frozenset[str] = frozenset()
        self._known: tuple[tuple[Definition, ...] | None, ...] = ()

    async def listed(self) -> None:
        """Have the tools as their servers listed them last. Raises `ToolSourceError`."""
        now = tuple(session.listing for session in self._sessions)
        if None in now:
            # At once, since each may take as long as its server takes to start.
            now = tuple(await asyncio.gather(*(one.listed() for one in self._sessions)))
        if len(now) != len(self._known) or any(
            one is not other for one, other in zip(now, self._known, strict=True)
        ):
            self._replace(now)

    def digest_of(self, name: str) -> str | None:
        """Return the digest of a server's tool, None for the agent's own."""
        return self._tools[name].version if name in self._digested else None

    def _replace(self, listings: tuple[tuple[Definition, ...] | None, ...]) -> None:
        offered = {
            (session.server.name, one.name): (session, one)
            for session, listing in zip(self._sessions, listings, strict=True)
            for one in listing or ()
        }
        prefixed = [one.server.name for one in self._sessions if one.server.prefix]
        names = offered_names(tuple(offered), self._reserved, prefixed)
        made = {name: tool_of(name, *offered[named]) for name, named in names.items()}
        self._set_tools({**{one.name: one for one in self._own}, **made})
        self._digested = frozenset(made)
        self._known = listings


def tool_of(name: str, session: Session, definition: Definition) -> Tool[..., Any]:
    """Return a server's tool under the name that a model gets."""
    return Tool(
        name=name,
        description=definition.description,
        schema=definition.schema,
        function=_calling(session, definition),
        check=checker_of(name, definition.schema, checked_again=True),
        options=ToolOptions(
            timeout=session.server.timeout,
            read_only=definition.read_only,
            idempotent=definition.idempotent,
            version=definition.digest,
        ),
    )


def _calling(session: Session, definition: Definition) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call(**arguments: Any) -> Any:
        meta = {IDEMPOTENCY_KEY: current_invocation().idempotency_key}
        answer = await session.call(definition.name, arguments, meta, again=definition.idempotent)
        return value_of(answer)

    return call


class Sessions:
    """Sessions by server; they connect as soon as they are made."""

    def __init__(self, servers: Iterable[McpServer] = ()) -> None:
        self._sessions: dict[McpServer, Session] = {}
        for server in servers:
            self._of(server)

    def registry(
        self, own: ToolRegistry, servers: Iterable[McpServer], reserved: Iterable[str]
    ) -> ToolRegistry:
        """Return the tools of `own` and of `servers`, which get no name among `reserved`."""
        return ListedTools(own, [self._of(server) for server in servers], reserved)

    async def aclose(self) -> None:
        """Disconnect from all of them."""
        await asyncio.gather(*(one.aclose() for one in self._sessions.values()))

    def _of(self, server: McpServer) -> Session:
        if server not in self._sessions:
            self._sessions[server] = Session(server)
            self._sessions[server].start()
        return self._sessions[server]


def offered_names(
    tools: Sequence[Named], taken: Iterable[str], prefixed: Iterable[str] = ()
) -> dict[str, Named]:
    """Return the tools by the names that a model gets, in their order.

    A name that is taken, or that two servers have, gets its server's name in front, and so do all
    tools of the servers in `prefixed`. Characters that providers refuse become `_`; a name that
    is too long then, or still taken, ends in a digest of what it stands for.
    """
    always = frozenset(prefixed)
    used = set(taken)
    wanted = Counter(_safe_name(tool) for server, tool in tools if server not in always)
    names: dict[str, Named] = {}
    for server, tool in tools:
        name = _safe_name(tool)
        if server in always or name in used or wanted[name] > 1:
            name = f"{_safe_name(server)}__{name}"
        if len(name) > _LONGEST or name in used or name in names:
            name = f"{name[: _LONGEST - _DIGEST - 1]}_{_name_digest(server, tool)}"
        if name not in used and name not in names:
            names[name] = (server, tool)
    return names


def _safe_name(name: str) -> str:
    return _NOT_IN_A_NAME.sub("_", name)


def _name_digest(server: str, tool: str) -> str:
    return hashlib.sha256(f"{server}\n{tool}".encode()).hexdigest()[:_DIGEST]
