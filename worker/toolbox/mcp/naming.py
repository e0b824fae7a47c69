"""Names under which a model sees the tools of MCP servers. Pure.

The same listings give the same names on every worker: nothing depends on who listed first.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST = 64
_DIGEST = 8

Named = tuple[str, str]
"""A server's name and its own name of one of its tools."""


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
    wanted = Counter(_safe(tool) for server, tool in tools if server not in always)
    names: dict[str, Named] = {}
    for server, tool in tools:
        name = _safe(tool)
        if server in always or name in used or wanted[name] > 1:
            name = f"{_safe(server)}__{name}"
        if len(name) > _LONGEST or name in used or name in names:
            name = f"{name[: _LONGEST - _DIGEST - 1]}_{_digest(server, tool)}"
        if name not in used and name not in names:
            names[name] = (server, tool)
    return names


def _safe(name: str) -> str:
    return _NOT_IN_A_NAME.sub("_", name)


def _digest(server: str, tool: str) -> str:
    return hashlib.sha256(f"{server}\n{tool}".encode()).hexdigest()[:_DIGEST]
