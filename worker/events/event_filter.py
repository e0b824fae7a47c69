"""Filters envelopes: drops changes of status of runs that do not broadcast them.

Reads the runs' configurations, each once; knows no transport.
"""

from stepfleet.orchestrator.agents.overrides import with_stored_overrides
from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.events.broadcast.port import Envelope
from stepfleet.orchestrator.events.envelope import EventType
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.configs import Configs
from stepfleet.orchestrator.store.keys import Keys


class EventFilter:
    """Drops the events that a run's `BroadcastConfig` excludes."""

    def __init__(self, connection: Connection, keys: Keys, configs: Configs) -> None:
        self._connection = connection
        self._keys = keys
        self._configs = configs

    async def broadcast(self, envelopes: tuple[Envelope, ...]) -> list[Envelope]:
        """Return those that are broadcast, in order. Raises `StoreError` as the store does."""
        changed = {one["session_id"] for one in envelopes if one["type"] == EventType.STATUS}
        quiet = await self._quiet(sorted(changed))
        return [
            one
            for one in envelopes
            if one["type"] != EventType.STATUS or one["session_id"] not in quiet
        ]

    async def _quiet(self, run_ids: list[str]) -> set[str]:
        headers = await self._connection.execute_all(
            *(("HMGET", self._keys.run(run_id), "config", "overrides") for run_id in run_ids)
        )
        return {
            run_id
            for run_id, (digest, overrides) in zip(run_ids, headers, strict=True)
            if digest and not await self._tracks(digest, overrides)
        }

    async def _tracks(self, digest: str, overrides: str | None) -> bool:
        try:
            config = with_stored_overrides(await self._configs.load(digest), overrides)
        except AgentException:
            return True  # written by a newer version: one event too many is the smaller harm
        return config.broadcast.auto_status_tracking
