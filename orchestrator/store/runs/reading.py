"""Runs as their callers read them: from anywhere, while they run and after."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.events.envelope import numbered
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run.origin import RunOrigin
from stepfleet.orchestrator.records.run.results import AgentRunResult, LostAttempt, run_status
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import LoggedStep, StepResult
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.configs import Configs
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.records.codec import (
    Fields,
    check_version,
    load_log,
    load_lost,
    load_messages,
    load_outcome,
    load_state,
    log_begin,
    moment,
)
from stepfleet.orchestrator.store.records.events import load_events


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run, read in one round trip."""

    run_id: str
    agent: str
    step: int
    header: Fields
    state: AgentState
    config: AgentConfig
    log: tuple[LoggedStep, ...]
    lost: tuple[LostAttempt, ...]
    fields: Fields = field(default_factory=dict)
    """The log as it is stored: steps and inputs by their numbers."""
    first: int = 0
    """The step at which the log begins: what is before it was trimmed by the run's memory."""

    @property
    def overrides(self) -> dict[str, Any]:
        """The run's own changes to its agent's configuration."""
        stored = self.header.get("overrides")
        return dict(orjson.loads(stored)) if stored else {}

    def result(self) -> AgentRunResult:
        """Return the run's result, as far as it has come."""
        header, state = self.header, self.state
        steps = tuple(logged.result for logged in self.log)
        reason = StopReason(header["stop_reason"]) if header.get("stop_reason") else None
        ended = header.get("ended")
        started = header.get("execution_started") or header["created"]
        return AgentRunResult(
            run_id=self.run_id,
            agent_name=self.agent,
            lifecycle=state.status,
            stop_reason=reason,
            status=run_status(reason) if reason else None,
            output=state.last_output,
            structured=state.answer.structured if state.answer else None,
            schema_name=state.answer.schema_name if state.answer else None,
            steps=steps,
            usage=state.session_usage,
            cost_usd=state.session_cost_usd,
            cumulative_execution_seconds=state.info.cumulative_execution_seconds,
            start_time=moment(started),
            end_time=moment(ended) if ended else None,
            error=header.get("error") or None,
            max_iterations=self.config.max_steps,
            batch_id=header.get("batch") or None,
            line_id=header.get("line") or None,
            row=int(header["row"]) if header.get("row") else None,
            parent_agent_id=state.parent_agent_id,
            origin=RunOrigin.from_json(header["origin"]) if header.get("origin") else None,
            metadata=state.metadata,
            outcome=state.last_continuation_outcome,
            lost_attempts=tuple(lost.estimated_by(steps) for lost in self.lost),
        )


class Runs:
    """Reads runs and their events."""

    def __init__(self, connection: Connection, keys: Keys, configs: Configs) -> None:
        self._connection = connection
        self._keys = keys
        self._configs = configs

    async def get(self, run_id: str) -> StoredRun:
        """Return a run.

        Raises `ConfigurationError` if there is none of that id, `SerializationError` if this
        version cannot read it.
        """
        run_key = self._keys.run(run_id)
        header, fields, outcomes, lost = await self._connection.execute_all(
            *(("HGETALL", f"{run_key}{part}") for part in ("", ":log", ":outcomes", ":lost"))
        )
        if not header:
            raise unknown_run(run_id)
        check_version(header)
        config = await self._configs.of_run(header)
        whole = sum(name.isdigit() for name in fields) >= int(header["step"])
        first = 0 if whole else log_begin(header)
        log = load_log(fields, outcomes, first)
        now = moment(header["updated"])
        messages = load_messages(
            config.instructions, fields, [step.messages for step in log], first
        )
        calls = tuple(call for step in log for call in step.result.tool_calls)
        state = load_state(header, messages, calls, now)
        if outcome := load_outcome(header.get("outcome")):
            state = state.with_continuation_outcome(outcome)
        return StoredRun(
            run_id=run_id,
            agent=header["agent"],
            step=int(header["step"]),
            header=header,
            state=state,
            config=config,
            log=tuple(log),
            lost=load_lost(lost),
            fields=fields,
            first=first,
        )

    async def step(self, run_id: str, number: int) -> StepResult | None:
        """Return one committed step of a run, counted from 1; None if there is no such one."""
        log = f"{self._keys.run(run_id)}:log"
        stored = await self._connection.execute("HGET", log, number - 1)
        return load_log({str(number): stored})[0].result if stored else None

    async def events(self, run_id: str, after: str = "0") -> tuple[list[dict[str, Any]], str]:
        """Return the events behind the position `after`, and the position to go on from.

        Each has its `sequence` number, from 1 without gaps, and an `event_id` made of it.
        """
        key = f"{self._keys.run(run_id)}:events"
        reply = await self._connection.execute("XREAD", "COUNT", 500, "STREAMS", key, after)
        events: list[dict[str, Any]] = []
        for position, fields in _entries(reply):
            first = int(fields["first"])
            events += numbered(
                load_events(run_id, fields["events"]),
                first,
                moment(position.partition("-")[0]),
            )
            after = position
        return events, after

    async def now(self) -> datetime:
        """Return Redis's time."""
        seconds, micros = await self._connection.execute("TIME")
        return moment(int(seconds) * 1000 + int(micros) // 1000)


def unknown_run(run_id: str) -> ConfigurationError:
    """Return the error about a run that is not in the store."""
    msg = f"no run has the id {run_id!r}; ended runs are removed after the retention time"
    return ConfigurationError(msg)


def _entries(reply: Any) -> list[tuple[str, Fields]]:
    if not reply:
        return []
    streams = reply.values() if isinstance(reply, dict) else [stream[1] for stream in reply]
    found: list[tuple[str, Fields]] = []
    for entries in streams:
        for batch in entries if entries and isinstance(entries[0], list) else [entries]:
            for position, fields in batch:
                found.append((position, fields))
    return found
