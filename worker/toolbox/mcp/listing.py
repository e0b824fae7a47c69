"""Reads the tools that an MCP server offers, within bounds. Pure.

Servers are strangers: their texts and schemas are cut, checked or left out; nothing is fetched.
"""

import hashlib
import logging
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcp_types import Tool as OfferedTool

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.tools.mcp import McpServer
from stepfleet.orchestrator.tools.schemas.bounded_json import (
    BoundsError,
    canonical_json,
    plain_json,
)
from stepfleet.orchestrator.tools.schemas.checks import check_sound
from stepfleet.orchestrator.tools.schemas.time_limit import TooMuchWorkError, allowed, limited
from stepfleet.orchestrator.tools.schemas.validators import check_budget

log = logging.getLogger(__name__)

MAX_TOOLS = 256
MAX_NAME = 200
MAX_DESCRIPTION = 4096
"""Characters of a description; more are cut."""
MAX_SCHEMA = 64 * 1024
"""Bytes of a schema; a tool with a larger one is left out."""
MAX_LISTING = 1024 * 1024
"""Bytes of all schemas and descriptions of a server; tools after them are left out."""
MAX_PARTS = 20_000
"""Objects and arrays of all schemas of a server."""
LISTING_SECONDS = 5.0
"""CPU time in which a listing is read and checked; tools after it are left out."""
_DIGEST = 16


@dataclass(frozen=True, slots=True)
class Definition:
    """One tool of a server under its own name, as models may see it.

    `digest` (hex) changes with everything that a model sees.
    """

    name: str
    description: str
    schema: Mapping[str, Any]
    digest: str
    read_only: bool
    idempotent: bool


def definitions(
    server: McpServer, offered: Iterable[OfferedTool], seconds: float = LISTING_SECONDS
) -> tuple[Definition, ...]:
    """Return the tools that agents get, sorted by name; tools left out are logged.

    Takes up to `seconds` of CPU time for a hostile listing: call it off the event loop.
    """
    found: dict[str, Definition] = {}
    spent = _Spent()
    with allowed(seconds):
        for one in offered:
            if server.only is not None and one.name not in server.only:
                continue
            if len(found) == MAX_TOOLS:
                log.warning("MCP server %r: of its tools, %d are offered", server.name, MAX_TOOLS)
                break
            try:
                with limited(seconds):
                    made = definition_of(server, one)
                    spent.add(made)
            except TooMuchWorkError:
                log.warning(
                    "MCP server %r: tool %.80r and those after it are not offered: its listing "
                    "takes more than %d s to check; choose some by `only`",
                    *(server.name, one.name, seconds),
                )
                break
            except (ConfigurationError, BoundsError) as error:
                log.warning(
                    "MCP server %r: tool %.80r is not offered: %s", server.name, one.name, error
                )
            else:
                found[one.name] = made
    return tuple(found[name] for name in sorted(found))


@dataclass(slots=True)
class _Spent:
    """Totals of the tools of a listing."""

    size: int = 0
    parts: int = 0

    def add(self, made: Definition) -> None:
        """Count one more tool. Raises `ConfigurationError` where it is one too many."""
        size = self.size + len(canonical_json(made.schema)) + len(made.description)
        parts = self.parts + check_budget(made.schema)
        if size > MAX_LISTING or parts > MAX_PARTS:
            raise ConfigurationError(
                f"all tools together would have more than {MAX_LISTING} bytes, or {MAX_PARTS} "
                "objects and arrays in their schemas; choose some by `only`"
            )
        self.size, self.parts = size, parts


def definition_of(server: McpServer, offered: OfferedTool) -> Definition:
    """Return one tool of a server.

    Raises `BoundsError` or `ConfigurationError` where it cannot be offered.
    """
    if not offered.name or len(offered.name) > MAX_NAME:
        raise ConfigurationError(f"its name must have 1 to {MAX_NAME} characters")
    schema = plain_json(offered.input_schema, limit=MAX_SCHEMA)
    _check_schema(offered.name, schema)
    description = _readable(offered.description or "")
    digest = digest_of(offered.name, description, schema)
    pinned = dict(server.pinned).get(offered.name, digest)
    if pinned != digest:
        raise ConfigurationError(f"its digest is {digest}, and {pinned!r} is pinned; review it")
    hints = offered.annotations if server.trust_annotations else None
    read_only = offered.name in server.read_only or bool(hints and hints.read_only_hint)
    idempotent = offered.name in server.idempotent or bool(hints and hints.idempotent_hint)
    return Definition(
        name=offered.name,
        description=description,
        schema=schema,
        digest=digest,
        read_only=read_only,
        idempotent=read_only or idempotent,
    )


def digest_of(name: str, description: str, schema: Mapping[str, Any]) -> str:
    """Return the digest of what a model sees of a tool (16 hex digits)."""
    text = canonical_json([name, description, schema])
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]


def _check_schema(name: str, schema: Mapping[str, Any]) -> None:
    if foreign := next(_foreign_references(schema), None):
        raise ConfigurationError(f"its schema refers to {foreign!r}; nothing is fetched")
    check_sound(name, schema)


def _foreign_references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for key in ("$ref", "$dynamicRef"):
            if isinstance(at := schema.get(key), str) and not at.startswith("#"):
                yield at
    parts = schema.values() if isinstance(schema, dict) else schema
    if isinstance(schema, dict | list):
        for part in parts:
            yield from _foreign_references(part)


def _readable(text: str) -> str:
    """Return text without control and invisible characters, which could hide its meaning."""
    kept = "".join(
        one for one in text[: 4 * MAX_DESCRIPTION] if one in "\n\t" or _is_visible(one)
    ).strip()
    return kept if len(kept) <= MAX_DESCRIPTION else f"{kept[: MAX_DESCRIPTION - 4]} ..."


def _is_visible(one: str) -> bool:
    return unicodedata.category(one) not in {"Cc", "Cf", "Cs", "Co", "Cn"}
