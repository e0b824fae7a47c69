"""The Lua scripts, bound to Python in one place."""

import hashlib
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError, RedisError, ResponseError

from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.redis_client.connection import Connection

STANDALONE = frozenset(
    {
        *("aside", "ask", "cache", "courier", "expire", "feed", "flag", "rescue", "swept", "turn"),
        *("unnote", "unused"),
    }
)
WAITING = frozenset({"park", "take", "keep", "leave", "deliver", "died"})
"""Scripts of runs that wait for tool calls: they share more than the others."""
PAGED = frozenset({"claim", "page"})
"""Scripts that read a run's log: they share more than the others, too."""
RENEWALS = {"renew": "journal", "retain": "keep"}
"""Scripts that a full Redis runs too, and the same ones without that right. They write new numbers
over old ones: leases that run out while Redis is full would cost every answer that is held."""
_ALLOWED = "#!lua flags=allow-oom\n"
_UNKNOWN_FLAGS = "compiling script"


@cache
def source(name: str) -> str:
    """Return the text of the script `name`, with what all scripts of a run share in front."""
    folder = files(__package__) / "scripts"
    own = (folder / f"{name}.lua").read_text("utf-8")
    if name in STANDALONE:
        return own
    shared = (
        "common",
        *(("waiting",) if name in WAITING else ("paging",) if name in PAGED else ()),
    )
    return "".join((folder / f"{part}.lua").read_text("utf-8") for part in shared) + own


def text(name: str) -> str:
    """Return what Redis is given to run: a script's source, behind the flags that it has."""
    return _ALLOWED + source(RENEWALS[name]) if name in RENEWALS else source(name)


@cache
def digest(name: str) -> str:
    """Return the SHA-1 under which Redis caches the script."""
    return hashlib.sha1(text(name).encode(), usedforsecurity=False).hexdigest()


def loaded(name: str, keys: list[str], *args: Any) -> tuple[Any, ...]:
    """Return the command that runs a script which the server has already."""
    return ("EVALSHA", digest(name), len(keys), *keys, *args)


async def load(connection: Connection, *names: str) -> None:
    """Have every server know the scripts: a thousand first calls at once need not bring them.

    What a server refuses to load, `run_script` sends with the call.
    """
    with suppress(RedisError, OSError, StoreError):
        for name in names:
            await connection.everywhere("SCRIPT", "LOAD", text(name))


async def run_script(
    connection: Connection, name: str, keys: list[str], *args: Any, once: bool = False
) -> Any:
    """Run a script; load it first where the server does not have it (any more).

    With `once` it waits for no Redis in trouble. Raises as `Connection.execute`.
    """
    execute = connection.attempt if once else connection.execute
    if name in RENEWALS and not connection.takes_flags:  # a server before Redis 7
        name = RENEWALS[name]
    try:
        return await execute(*loaded(name, keys, *args))
    except NoScriptError:
        try:
            return await execute("EVAL", text(name), len(keys), *keys, *args)
        except ResponseError as error:
            if name not in RENEWALS or _UNKNOWN_FLAGS not in str(error):
                raise
    connection.takes_flags = False
    return await run_script(connection, name, keys, *args, once=once)
