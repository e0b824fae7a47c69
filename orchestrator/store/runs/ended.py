"""Ended runs as a retry needs them: many of them in one round trip."""

from collections.abc import Sequence

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.records.codec import (
    Fields,
    check_version,
    load_log,
    load_state,
    log_begin,
    moment,
)
from stepfleet.orchestrator.store.runs.reading import StoredRun

_HEADER = (
    *("v", "agent", "config", "overrides", "slim", "since", "created", "updated"),
    *("execution_started", "status", "step", "seq", "want", "want_note"),
)


class EndedRuns:
    """Reads headers and logs of runs; no messages given, outcomes, events or lost attempts."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    async def headers(self, run_ids: Sequence[str]) -> list[Fields]:
        """Return what a retry needs of the runs' headers; {} for a run that is not there."""
        replies = await self._connection.execute_all(
            *(("HMGET", self._keys.run(run_id), *_HEADER) for run_id in run_ids)
        )
        return [
            {name: value for name, value in zip(_HEADER, reply, strict=True) if value is not None}
            for reply in replies
        ]

    async def logs(self, steps: Sequence[tuple[str, int]]) -> list[Fields]:
        """Return the logs of runs with so many steps, by the steps' numbers; no inputs."""
        reads = (
            ("HMGET", f"{self._keys.run(run_id)}:log", *range(count))
            for run_id, count in steps
            if count
        )
        replies = iter(await self._connection.execute_all(*reads))
        return [_by_number(next(replies)) if count else {} for _, count in steps]


def ended_run(run_id: str, header: Fields, log: Fields, config: AgentConfig) -> StoredRun:
    """Return a run without its conversation and its lost attempts. Pure.

    `config` has the run's overrides in it. Raises `SerializationError` as `Runs.get` does.
    """
    check_version(header)
    step = int(header["step"])
    first = 0 if len(log) >= step else log_begin(header)
    return StoredRun(
        run_id=run_id,
        agent=header["agent"],
        step=step,
        header=header,
        state=load_state(header, (), (), moment(header["updated"])),
        config=config,
        log=tuple(load_log(log, first=first)),
        lost=(),
        first=first,
    )


def _by_number(reply: Sequence[str | None]) -> Fields:
    return {str(number): step for number, step in enumerate(reply) if step is not None}
