"""The Lua scripts, bound to Python in one place."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import chain
from typing import Any

from redis.exceptions import NoScriptError, RedisError, ResponseError

from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.records.base import SCHEMA_VERSION
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.codec import check_version
from stepfleet.orchestrator.store.keys import Keys

SHARED = ("fields", "wait", "ledger", "common", "waiting", "paging")
"""Files whose definitions any script may use; each gets those that it reaches, in this order."""
ADMISSION = ("fields", "levels", "budgets", "learning", "blocked", "lines", "repairs")
"""Files that are parts of the script `admit`, as wholes: it is longer than one file should be."""
RENEWALS = {"renew": "journal", "retain": "keep"}
"""Scripts that a full Redis runs too, and the same ones without that right. They only replace
numbers: leases that run out while Redis is full would cost every answer that workers hold."""
_FUNCTION = re.compile(r"^(local function (?:[^\n]* end|.*?^end)\n)", re.MULTILINE | re.DOTALL)
_ALLOWED = "#!lua flags=allow-oom\n"
_UNKNOWN_FLAGS = "compiling script"


@cache
def file_texts() -> Mapping[str, str]:
    """Return the texts of all files of `scripts/` by name, whatever room they are in."""
    rooms = (room for room in (files(__package__) / "scripts").iterdir() if room.is_dir())
    found = (file for room in rooms for file in room.iterdir() if file.name.endswith(".lua"))
    return {file.name.removesuffix(".lua"): file.read_text("utf-8") for file in found}


def scripts() -> frozenset[str]:
    """Return the names of all scripts."""
    return frozenset(file_texts()) - {*SHARED, *ADMISSION}


@cache
def source(name: str) -> str:
    """Return the text of the script `name`, after what it uses of other files.

    Redis builds all functions of a script anew at each call, which costs it more than calling one.
    None is in it that it never calls, and those that only `seldom('name', ...)` calls are inside of
    that one, which builds them.
    """
    own = file_texts()[name]
    if name == "admit":
        return "".join(file_texts()[part] for part in ADMISSION) + own
    *head, body = _FUNCTION.split(own)
    main, functions = "".join((*head[::2], body)), head[1::2]
    mine = frozenset().union(*map(_defined, _definitions(own)))
    kept = _reached(_names(main), functions, seldom=False)
    often = _reached(_names("".join((main, *kept))) - mine, _shared(), seldom=False)
    every = _reached((_names(own) | _seldom(own)) - mine, _shared(), seldom=True)
    inner = [part for part in (*every, *functions) if part not in (*often, *kept)]
    called = sorted(_seldom("".join((*every, own))))
    if not called:
        return "".join((*often, own))
    known = ", ".join(f"{one} = {one}" for one in called)
    seldom = ("function seldom(name, ...)\n", *inner, f"return ({{ {known} }})[name](...)\nend\n")
    rest = (part for part in head if part not in inner)
    return "".join(("local seldom\n", *often, *rest, *seldom, body))


@cache
def _shared() -> Sequence[str]:
    """Return the definitions of `SHARED`."""
    return [part for file in SHARED for part in _definitions(file_texts()[file])]


def _reached(used: frozenset[str], parts: Sequence[str], *, seldom: bool) -> list[str]:
    """Return the definitions that names reach, with or without what `seldom` calls."""
    reached: list[str] = []
    for part in reversed(parts):  # a definition uses earlier ones only
        if used & _defined(part):
            used |= _names(part) | (_seldom(part) if seldom else frozenset())
            reached.insert(0, part)
    return reached


@cache
def _definitions(text: str) -> Sequence[str]:
    """Return the definitions of a file, without the comments before them."""
    code = re.sub(r"^--.*\n", "", text, flags=re.MULTILINE)
    return re.split(r"^(?=local )", code, flags=re.MULTILINE)[1:]


@cache
def _defined(definition: str) -> frozenset[str]:
    """Return the names that a definition defines."""
    found = re.match(r"local (?:function )?([\w, ]+)", definition)
    return _names(found[1]) if found else frozenset()


@cache
def _names(code: str) -> frozenset[str]:
    """Return the names that occur in code: no fields, and none in comments or texts."""
    return frozenset(re.findall(r"(?<![.\w])[A-Za-z_]\w*", re.sub(r"--.*|'[^'\n]*'", "", code)))


@cache
def _seldom(code: str) -> frozenset[str]:
    """Return the names of what code calls by `seldom`."""
    return frozenset(re.findall(r"\bseldom\('(\w+)'", code))


def text(name: str) -> str:
    """Return a script as Redis gets it: its source behind its flags."""
    return _ALLOWED + source(RENEWALS[name]) if name in RENEWALS else source(name)


@cache
def digest(name: str) -> str:
    """Return the SHA-1 under which Redis caches the script."""
    return hashlib.sha1(text(name).encode(), usedforsecurity=False).hexdigest()


ScriptCall = tuple[Any, ...]
"""The arguments of `run_script` after the connection: a script's name, its keys, its arguments."""


def loaded(name: str, keys: Sequence[str], *args: Any) -> tuple[Any, ...]:
    """Return the command that runs a script which the server already has."""
    return ("EVALSHA", digest(name), len(keys), *keys, *args)


async def load(connection: Connection, *names: str) -> None:
    """Load scripts, or all, on every server, so that a thousand concurrent first calls send none.

    `run_script` sends a script that a server refuses to load with the call.
    """
    every = (*sorted(scripts()), *RENEWALS)  # these last: servers before Redis 7 refuse them
    with suppress(RedisError, OSError, StoreError):
        for name in names or every:
            await connection.everywhere("SCRIPT", "LOAD", text(name))


async def run_script(
    connection: Connection, name: str, keys: Sequence[str], *args: Any, once: bool = False
) -> Any:
    """Run a script, and load it where the server has lost it.

    With `once` the call is not repeated while Redis fails. Raises as `Connection.execute` does.
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


def flat(fields: Mapping[str, Any]) -> list[Any]:
    """Return fields as Redis takes them: name, value, name, value."""
    return list(chain.from_iterable(fields.items()))


def detail_of(reply: Sequence[Any]) -> str:
    """Return the detail after the first word of a script's reply; '' where there is none."""
    return str(reply[1]) if len(reply) > 1 else ""


@dataclass(frozen=True, slots=True)
class RunScripts:
    """Runs the scripts that belong to one run each.

    Their keys are the run's header, the shard's due index and, for scripts that push messages, the
    broker list `queue` (None where store and broker are not one Redis). Their first argument is the
    run's id.
    """

    connection: Connection
    keys: Keys
    queue: str | None = None

    async def run(self, name: str, run_id: str, /, *args: Any, **fields: Any) -> Any:
        """Run a script with these arguments and, after them, names and values of fields."""
        return await run_script(self.connection, *self.call(name, run_id, *args, **fields))

    def call(
        self, name: str, run_id: str, /, *args: Any, queues: Sequence[str] = (), **fields: Any
    ) -> tuple[Any, ...]:
        """Return the arguments of `run_script` for a script; `queues` are further broker lists."""
        keys = [*self.keys.script_keys(run_id, self.queue), *queues]
        return (name, keys, run_id, *args, *flat(fields))

    async def ensure_version(self, run_id: str, header: Mapping[str, str]) -> None:
        """Note our version of the records in a run of the version before: we write to it now.

        Workers and clients of that version read their own records only. The note makes them refuse
        the run, before they would misread it. Raises `SerializationError` as `check_version` does.
        """
        if check_version(header):
            await self.run("version", run_id, SCHEMA_VERSION)
