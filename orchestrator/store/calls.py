"""The Lua scripts, bound to Python in one place."""

import hashlib
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError, RedisError

from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.store.connection import Connection

STANDALONE = frozenset({"aside", "cache", "courier", "expire", "feed", "rescue", "unused"})
WAITING = frozenset({"park", "take", "keep", "leave", "deliver"})
"""Scripts of runs that wait for tool calls: they share more than the others."""


@cache
def source(name: str) -> str:
    """Return the text of the script `name`, with what all scripts of a run share in front."""
    folder = files(__package__) / "scripts"
    own = (folder / f"{name}.lua").read_text("utf-8")
    if name in STANDALONE:
        return own
    shared = ("common", "waiting") if name in WAITING else ("common",)
    return "".join((folder / f"{part}.lua").read_text("utf-8") for part in shared) + own


@cache
def digest(name: str) -> str:
    """Return the SHA-1 under which Redis caches the script."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


def loaded(name: str, keys: list[str], *args: Any) -> tuple[Any, ...]:
    """Return the command that runs a script which the server has already."""
    return ("EVALSHA", digest(name), len(keys), *keys, *args)


async def load(connection: Connection, *names: str) -> None:
    """Have every server know the scripts: a thousand first calls at once need not bring them.

    What a server refuses to load, `run_script` sends with the call.
    """
    with suppress(RedisError, OSError, StoreError):
        for name in names:
            await connection.everywhere("SCRIPT", "LOAD", source(name))


async def run_script(connection: Connection, name: str, keys: list[str], *args: Any) -> Any:
    """Run a script; load it first where the server does not have it (any more)."""
    try:
        return await connection.execute(*loaded(name, keys, *args))
    except NoScriptError:
        return await connection.execute("EVAL", source(name), len(keys), *keys, *args)
