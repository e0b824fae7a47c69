"""The settings of limits in Redis, and what is used of them."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import orjson
from pydantic import Field

from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.limits.limit import Limit, limit_of
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.keys import Keys

VERSION = "version"
PROVIDED = "provided"
"""Marks a limit that comes from a configuration: the next worker's replaces it."""


class LimitUse(Record):
    """A limit and what is used of it at this moment.

    `in_flight` calls are under way or about to begin; `levels` are what is left of each rate
    (below 0: more was taken than there was); `waiting` steps wait in its line. Nobody calls under
    it for `cool_seconds` more; `refused` calls got a 429.
    """

    name: str
    limit: Limit | None = None
    in_flight: int = 0
    levels: dict[str, float] = Field(default_factory=dict)
    waiting: int = 0
    cool_seconds: float = 0.0
    refused: int = 0
    waits_for: str = ""


_LEVELS = {
    "r": "requests_per_minute",
    "t": "tokens_per_minute",
    "i": "input_tokens_per_minute",
    "o": "output_tokens_per_minute",
    "s": "starts_per_minute",
}


def short_of(why: str) -> str:
    """Return for people what the script notes of a limit that has no room: `name kind`."""
    name, _, kind = why.rpartition(" ")
    shown = _LEVELS.get(kind, {"c": "a pause after a 429", "f": "calls in flight"}.get(kind, kind))
    return f"{shown.replace('_', ' ')} of {name}" if name else ""


class LimitSettings:
    """Reads and writes the limits of a fleet."""

    def __init__(self, connection: Connection, found: Keys) -> None:
        self._connection = connection
        self._settings = found.of(keys.LIMIT_SETTINGS)
        self._state = found.of(keys.LIMIT_STATE)
        self._lines = found.of(keys.LIMIT_LINES)

    async def version(self) -> str:
        """Return what changes with every change of a limit; "" where none was ever set."""
        return await self._connection.execute("HGET", self._settings, VERSION) or ""

    async def read(self) -> tuple[str, dict[str, Limit]]:
        """Return the version and the limits. Raises `StoreError`, also for what is no limit."""
        stored = dict(await self._connection.execute("HGETALL", self._settings))
        version = stored.pop(VERSION, "")
        try:
            limits = {name: _read(name, text) for name, text in stored.items()}
        except (ConfigurationError, ValueError, TypeError) as error:
            msg = f"a limit in Redis cannot be read: {error}; write it again (stepfleet limits set)"
            raise StoreError(msg) from None
        return version, dict(sorted(limits.items()))

    async def one(self, name: str) -> Limit | None:
        """Return the limit of that name; None where there is none, or none that can be read."""
        text = await self._connection.execute("HGET", self._settings, name)
        with suppress(ConfigurationError, ValueError, TypeError):
            return _read(name, text) if text else None
        return None

    async def names(self) -> list[str]:
        """Return the names of all limits."""
        known = await self._connection.execute("HKEYS", self._settings)
        return sorted(name for name in known if name != VERSION)

    async def set(self, limits: Mapping[str, Limit]) -> None:
        """Write limits, each as a whole. They hold for the next call."""
        texts = [part for name, one in limits.items() for part in (name, _stored(one))]
        if texts:
            await self._change(("HSET", self._settings, *texts))

    async def provide(self, limits: Mapping[str, Limit]) -> None:
        """Write limits of a configuration, but for names that somebody has set in Redis."""
        if not limits:
            return
        known = await self._connection.execute("HMGET", self._settings, *limits)
        texts = []
        for (name, limit), text in zip(limits.items(), known, strict=True):
            provided = _stored(limit, provided=True)
            if text != provided and (text is None or orjson.loads(text).get(PROVIDED)):
                texts += [name, provided]
        if texts:
            await self._change(("HSET", self._settings, *texts))

    async def clear(self, names: Collection[str]) -> int:
        """Remove limits; return how many there were."""
        return int(await self._change(("HDEL", self._settings, *names))) if names else 0

    async def use(self) -> list[LimitUse]:
        """Return what is used of each limit, by name. Raises `StoreError` as `read` does."""
        _, limits = await self.read()
        execute = self._connection.execute
        stored = dict(await execute("HGETALL", self._state))
        flat = await execute("ZRANGE", self._lines, 0, -1, "WITHSCORES")
        waiting = dict(zip(flat[::2], map(int, map(float, flat[1::2])), strict=True))
        now = (await self._connection.now()).timestamp() * 1000
        names = {*limits, *waiting, *(name for name in stored if not name.startswith("*"))}
        return [
            _use(name, limits.get(name), orjson.loads(stored.get(name, "{}")), waiting, now)
            for name in sorted(names)
        ]

    async def _change(self, command: tuple[Any, ...]) -> Any:
        reply, _ = await self._connection.execute_all(
            command, ("HINCRBY", self._settings, VERSION, 1)
        )
        return reply


def _stored(limit: Limit, *, provided: bool = False) -> str:
    fields = limit.model_dump(exclude_unset=True)
    return orjson.dumps({**fields, PROVIDED: 1} if provided else fields).decode()


def _read(name: str, text: str) -> Limit:
    stored = orjson.loads(text)
    # A later release may know more fields; the script reads them all.
    fields = {field: stored[field] for field in Limit.model_fields if field in stored}
    return limit_of(name, fields) if fields.keys() - {"burst"} else Limit.model_construct()


def _use(
    name: str, limit: Limit | None, state: dict[str, Any], waiting: Mapping[str, int], now: float
) -> LimitUse:
    return LimitUse(
        name=name,
        limit=limit if limit and limit.model_fields_set else None,
        in_flight=int(state.get("f", 0)),
        levels={field: round(state[kind], 3) for kind, field in _LEVELS.items() if kind in state},
        waiting=waiting.get(name, 0),
        cool_seconds=max(round((state.get("cool", 0) - now) / 1000, 1), 0.0),
        refused=int(state.get("refused", 0)),
        waits_for=short_of(state.get("why", "")) if waiting.get(name) else "",
    )
