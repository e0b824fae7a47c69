"""What all workers of a fleet share, as a client sees it: limits, and the response cache."""

from collections.abc import Mapping
from typing import Any

from stepfleet.orchestrator.client.audit import changes
from stepfleet.orchestrator.client.session import FleetSession
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.limits.limit import Limit
from stepfleet.orchestrator.models.caching import CacheStatistics
from stepfleet.orchestrator.store.limits import LimitStore, LimitUse, LimitWait


def _limits_named(given: Mapping[str, Any], _: Any) -> str:
    return f"limits {', '.join(given['names'])}" if given["names"] else "all limits"


def _entries_of(given: Mapping[str, Any], _: Any) -> str:
    which = (f"{name} {given[name]}" for name in ("key", "model") if given[name] is not None)
    return " ".join(("cache", *which))


class AsyncFleetLimits:
    """Limits that all workers of the fleet share: `fleet.limits`.

    Changes hold for the next call; workers that had none before find the first one within seconds.
    """

    def __init__(self, session: FleetSession) -> None:
        self._session = session

    async def all(self) -> dict[str, Limit]:
        """Return the limits by name."""
        return (await (await self._limits()).read())[1]

    async def use(self) -> list[LimitUse]:
        """Return the use of each limit, and how many steps wait in its line."""
        return await (await self._limits()).use()

    async def wait_of(self, run_id: str) -> LimitWait | None:
        """Return since when the run waits for limits, and for which; None where it does not."""
        return await (await self._limits()).wait_of(run_id)

    @changes("set", "limit {name}")
    async def set(self, name: str, /, **fields: Any) -> Limit:
        """Change fields of a limit, and return it; None takes a field away.

        `name` is that of a model (`openai:gpt-4o-mini`, `openai:*`), or `tenant:acme`, `batch:*`,
        `agent:clerk`. Raises `ConfigurationError` that names field and fix.
        """
        return await (await self._limits()).change(name, fields)

    async def submitted(self, run_id: str, limit: Limit) -> None:
        """Set the budget of a new run, unless it has one; it goes after the run's end."""
        await (await self._limits()).submitted(f"run:{run_id}", limit)

    @changes("provide", "limits")
    async def provide(self, limits: Mapping[str, Limit]) -> None:
        """Set limits as a configuration does: not those that somebody has set by `set`."""
        await (await self._limits()).provide(limits)

    @changes("clear", _limits_named)
    async def clear(self, *names: str) -> int:
        """Remove limits, all where none is named; return how many there were."""
        limits = await self._limits()
        return await limits.clear(names or await limits.names())

    async def _limits(self) -> LimitStore:
        return (await self._session.store()).limits


class AsyncFleetCache:
    """The response cache, which all workers of the fleet share: `fleet.cache`."""

    def __init__(self, session: FleetSession) -> None:
        self._session = session

    async def statistics(self) -> CacheStatistics:
        """Return the entries, their size in bytes, hits and misses, in all and by model."""
        return await (await self._session.store()).cache.statistics()

    @changes("clear", _entries_of)
    async def clear(self, *, key: str | None = None, model: str | None = None) -> int:
        """Drop one entry, those of one model, or all with the counters; return how many went.

        `key` is a step's `cache.key`, `model` as agents name it (`provider:name`). Calls that are
        under way may fill the cache again. Raises `ConfigurationError` for an invalid key.
        """
        if key is not None and model is not None:
            raise ConfigurationError("key and model are two ways to choose; give one of them")
        entries = (await self._session.store()).cache
        if key is not None:
            return await entries.drop(key)
        return await (entries.clear() if model is None else entries.drop_model(model))
