"""The definition of an MCP server whose tools an agent offers: its place, the trust in it.

Knows no protocol and connects to nothing: submitting runs needs no server. Workers connect.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from stepfleet.orchestrator.errors import ConfigurationError, ToolExecutionError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_MAX_SECONDS = 7 * 24 * 3600


class ToolSourceError(ToolExecutionError):
    """An MCP server is away, or its tools are not known yet; another attempt may reach it."""

    retryable = True


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server as a source of tools; made by `mcp_server`, which documents the fields."""

    name: str
    command: tuple[str, ...] = ()
    url: str = ""
    env: tuple[str, ...] = ()
    cwd: str | None = None
    header_env: tuple[tuple[str, str], ...] = ()
    only: frozenset[str] | None = None
    pinned: tuple[tuple[str, str], ...] = ()
    prefix: bool = False
    read_only: frozenset[str] = frozenset()
    idempotent: frozenset[str] = frozenset()
    trust_annotations: bool = False
    timeout: float | None = None
    connect_timeout: float = 30.0
    refresh: float = 300.0
    version: str = "1"


def mcp_server(  # noqa: PLR0913 - one argument per setting of a server
    name: str,
    *,
    command: Sequence[str] = (),
    url: str = "",
    env: Iterable[str] = (),
    cwd: str | None = None,
    header_env: Mapping[str, str] | None = None,
    only: Iterable[str] | None = None,
    pinned: Mapping[str, str] | None = None,
    prefix: bool = False,
    read_only: Iterable[str] = (),
    idempotent: Iterable[str] = (),
    trust_annotations: bool = False,
    timeout: float | None = None,
    connect_timeout: float = 30.0,
    refresh: float = 300.0,
    version: str = "1",
) -> McpServer:
    """Return a source of tools for `Agent(tools=[...])`: an MCP server that workers reach.

    `command` starts it on each worker, `url` is its address (streamable HTTP); give one of them.
    `env` names the worker's environment variables that the command gets besides PATH, HOME and the
    like; `header_env` maps HTTP headers to the variables that hold their values. `cwd` is the
    command's working directory.

    `only` names the tools to offer, `pinned` maps tools to the digest of their definition: one
    with another definition is not offered. Names that another tool has get `<name>__` in front;
    all do with `prefix`.

    Tools named in `read_only` or `idempotent` may run again when a worker was lost;
    `trust_annotations` accepts the server's own annotations of that. `timeout` bounds a call and
    `connect_timeout` a connection, in seconds; `refresh` is the seconds between two listings of
    its tools. `version` is yours, and stored with each run.

    Raises `ConfigurationError` that names the field and the fix.
    """
    server = McpServer(
        name=name,
        command=_words(name, "command", command),
        url=url,
        env=_words(name, "env", env),
        cwd=cwd,
        header_env=tuple(sorted((header_env or {}).items())),
        only=None if only is None else frozenset(_words(name, "only", only)),
        pinned=tuple(sorted((pinned or {}).items())),
        prefix=prefix,
        read_only=frozenset(_words(name, "read_only", read_only)),
        idempotent=frozenset(_words(name, "idempotent", idempotent)),
        trust_annotations=trust_annotations,
        timeout=timeout,
        connect_timeout=connect_timeout,
        refresh=refresh,
        version=version,
    )
    for field, problem in (*_of_place(server), *_of_secrets(server), *_of_seconds(server)):
        raise _wrong(name, field, problem)
    return server


def _wrong(name: str, field: str, problem: str) -> ConfigurationError:
    return ConfigurationError(f"MCP server {name!r}: field {field!r} {problem}")


def _words(name: str, field: str, given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise _wrong(name, field, f"is text; write a list: {field}=[{given!r}]")
    words = tuple(given)
    if not all(isinstance(one, str) and one and "\x00" not in one for one in words):
        raise _wrong(name, field, "must hold texts that are not empty")
    return words


def _of_place(server: McpServer) -> Iterator[tuple[str, str]]:
    """Yield the fields of a server's name and place that are wrong, each with its problem."""
    if not isinstance(server.name, str) or not _NAME.fullmatch(server.name):
        yield "name", "must be 1 to 32 letters, digits, _ or -"
    if bool(server.command) == bool(server.url):
        yield "command", "or 'url': give one of them, the place of the server"
    elif server.command:
        if server.header_env:
            yield "header_env", "is for a url; a command gets env"
    else:
        parts = urlsplit(server.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield "url", f"must begin with http:// or https://, not {server.url!r}"
        if parts.username or parts.password:
            yield "url", "holds a password; put it into a variable and name it in header_env"
        if server.env or server.cwd:
            yield "env" if server.env else "cwd", "is for a command; a url gets header_env"


def _of_secrets(server: McpServer) -> Iterator[tuple[str, str]]:
    for variable in (*server.env, *(variable for _, variable in server.header_env)):
        if not _VARIABLE.fullmatch(variable):
            field = "env" if variable in server.env else "header_env"
            yield field, f"must name environment variables of the worker, not {variable!r}"
    for header, _ in server.header_env:
        if not _HEADER.fullmatch(header):
            yield "header_env", f"has {header!r}, which is not the name of a header"


def _of_seconds(server: McpServer) -> Iterator[tuple[str, str]]:
    for field in ("timeout", "connect_timeout", "refresh"):
        seconds = getattr(server, field)
        if seconds is not None and not 0 < seconds <= _MAX_SECONDS:
            yield field, f"must be seconds, above 0 and at most {_MAX_SECONDS} (7 days)"
