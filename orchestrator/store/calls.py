"""The Lua scripts, bound to Python in one place."""

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError

from stepfleet.orchestrator.store.connection import Connection

STANDALONE = frozenset({"rescue"})


@cache
def source(name: str) -> str:
    """Return the text of the script `name`, with what all scripts of a run share in front."""
    folder = files(__package__) / "scripts"
    own = (folder / f"{name}.lua").read_text("utf-8")
    return own if name in STANDALONE else (folder / "common.lua").read_text("utf-8") + own


@cache
def digest(name: str) -> str:
    """Return the SHA-1 under which Redis caches the script."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


async def run_script(connection: Connection, name: str, keys: list[str], *args: Any) -> Any:
    """Run a script; load it first where the server does not have it (any more)."""
    try:
        return await connection.execute("EVALSHA", digest(name), len(keys), *keys, *args)
    except NoScriptError:
        return await connection.execute("EVAL", source(name), len(keys), *keys, *args)
