"""Results of many ended runs, read together: no conversations. Reads; changes nothing."""

import logging
from collections.abc import AsyncIterator, Sequence

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.records.state import TERMINAL
from stepfleet.orchestrator.store.archived import leave_out
from stepfleet.orchestrator.store.codec import Fields, load_end, load_lost, load_results, log_begin
from stepfleet.orchestrator.store.gateway import Gateway
from stepfleet.orchestrator.store.runs.reading import (
    Found,
    by_number,
    in_parts,
    result_of,
    steps_of,
)

log = logging.getLogger(__name__)


class RunResults(Gateway):
    """Reads the results of ended runs."""

    async def read(
        self, run_ids: Sequence[str]
    ) -> AsyncIterator[tuple[AgentRunResult, AgentConfig]]:
        """Yield the runs' results in this order, each with the run's configuration.

        Those that are gone, or go on after a retry, are left out. So is, with an entry in the log,
        one that this version cannot read, or whose file in the archive is damaged or gone. Raises
        `ArchiveError` or `ConfigurationError` where the archive cannot be reached.
        """
        reads = (("HGETALL", self._keys.run(run_id)) for run_id in run_ids)
        found = await self._reads.execute_all(*reads, report=leave_out)
        headers = zip(run_ids, found, strict=True)
        for part in in_parts(one for one in headers if one[1].get("status") in TERMINAL):
            for (run_id, header), log_and_lost in zip(part, await self._logs(part), strict=True):
                if log_and_lost is None:
                    continue
                try:
                    config = await self._configs.of_run(header)
                    result = _result(run_id, header, config, *log_and_lost)
                except SerializationError:
                    log.exception("run %s is left out of the results", run_id)
                else:
                    yield result, config

    async def _logs(self, part: Sequence[Found]) -> list[tuple[Fields, Fields] | None]:
        """Return runs' steps and lost attempts; None for a run that has not ended as it had."""
        commands = []
        for run_id, header in part:
            key, count = self._keys.run(run_id), steps_of(header)
            commands += [
                ("HMGET", f"{key}:log", *range(max(count, 1))),
                ("HGETALL", f"{key}:lost"),
                ("HGET", key, "ended"),
            ]
        replies = await self._reads.execute_all(*commands, report=leave_out)
        found = zip(part, replies[::3], replies[1::3], replies[2::3], strict=True)
        return [
            (by_number(log), lost) if ended == header.get("ended") else None
            for (_, header), log, lost, ended in found
        ]


def _result(
    run_id: str, header: Fields, config: AgentConfig, log: Fields, lost: Fields
) -> AgentRunResult:
    first = 0 if len(log) >= steps_of(header) else log_begin(header)
    steps = load_results(log, first)
    return result_of(run_id, header, config, load_end(header), steps, load_lost(lost))
