"""Reads why runs ended without completing: many at once, no conversations."""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run.facts import (
    FailedRun,
    LastError,
    cause_of_end,
    explains,
    last_error,
)
from stepfleet.orchestrator.records.state import NOT_COMPLETED
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.configs import Configs
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.records.codec import (
    Fields,
    check_version,
    load_errors,
    load_lost,
    load_used,
)
from stepfleet.orchestrator.store.runs.reading import (
    EndedRuns,
    Found,
    in_parts,
    open_attempts,
    steps_of,
)

log = logging.getLogger(__name__)

_FIELDS = (
    *("v", "agent", "config", "overrides", "slim", "vain", "vain_before"),
    *("status", "step", "stop_reason", "error", "line", "tenant"),
)
_LIMITS = {
    StopReason.STEPS_LIMIT: ("max_steps",),
    StopReason.TOKEN_LIMIT: ("token_limit",),
    StopReason.TIME_LIMIT: ("time_limit", "cumulative_timeout"),
    StopReason.GUARD: ("budget_usd",),
}
_SHARED = 1_000


class FailedRuns:
    """Reads runs that did not complete. Configurations are read once for equal ones."""

    def __init__(self, connection: Connection, keys: Keys, configs: Configs) -> None:
        self._connection = connection
        self._keys = keys
        self._configs = configs
        self._ended = EndedRuns(connection, keys)
        self._known: dict[tuple[str, str], AgentConfig] = {}

    async def read(self, run_ids: Sequence[str]) -> list[FailedRun]:
        """Return the runs that have ended and did not complete, in this order.

        One that this version cannot read is left out, with a warning in the log.
        """
        headers = await self._ended.headers(run_ids, _FIELDS)
        pairs = zip(run_ids, headers, strict=True)
        found = [one for one in pairs if one[1].get("status") in NOT_COMPLETED]
        return [run for part in in_parts(found) async for run in self._part(part)]

    async def _part(self, part: Sequence[Found]) -> AsyncIterator[FailedRun]:
        logs = await self._ended.logs([(one, steps_of(header)) for one, header in part])
        losses = await self._lost(part)
        for (run_id, header), fields in zip(part, logs, strict=True):
            try:
                check_version(header)
                last = _newest_error(header, fields, losses.get(run_id, {}))
                yield failed_run(run_id, header, await self._config(header), last)
            except SerializationError as error:
                log.warning("run %s is left out of the failures: %s", run_id, error)

    async def _lost(self, part: Sequence[Found]) -> dict[str, Fields]:
        """Return the lost attempts of the runs that ran out of time."""
        late = [one for one, header in part if header["stop_reason"] == StopReason.TIME_LIMIT]
        reads = (("HGETALL", f"{self._keys.run(run_id)}:lost") for run_id in late)
        return dict(zip(late, await self._connection.execute_all(*reads), strict=True))

    async def _config(self, header: Fields) -> AgentConfig:
        about = (header["config"], header.get("overrides", ""))
        if about not in self._known:
            if len(self._known) >= _SHARED:
                del self._known[next(iter(self._known))]
            self._known[about] = await self._configs.of_run(header)
        return self._known[about]


def failed_run(
    run_id: str, header: Fields, config: AgentConfig, last: LastError | None
) -> FailedRun:
    """Return an ended run as failures are counted. Pure."""
    reason = StopReason(header["stop_reason"])
    error = header.get("error") or ""
    why = explains(reason, last)
    return FailedRun(
        run_id=run_id,
        line_id=header.get("line") or None,
        tenant=header.get("tenant"),
        agent=header["agent"],
        model=config.model,
        stop_reason=reason,
        step=why.step if why else steps_of(header),
        text=why.message if why else error,
        cause=cause_of_end(reason, error, last, config.model),
        limits=_raised(header, config, reason),
    )


def _raised(header: Fields, config: AgentConfig, reason: StopReason) -> dict[str, int | float]:
    """Return limits that a retry has to raise: twice their values, or what was used of them."""
    limits = {name: getattr(config, name) for name in _LIMITS.get(reason, ())}
    set_ones = {name: value for name, value in limits.items() if value is not None}
    if not set_ones:
        return {}
    used = load_used(header)
    return {name: round(2 * max(one, used.of(name)), 6) for name, one in set_ones.items()}


def _newest_error(header: Fields, fields: Fields, lost: Mapping[str, str]) -> LastError | None:
    execution, steps = load_errors(header, fields)
    newest = [step.result for step in steps if step.execution == execution]
    return last_error(newest, open_attempts(header, load_lost(dict(lost))))
