"""Creates runs and batches; submitting the same thing twice changes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson
from redis.exceptions import ResponseError

from stepfleet.orchestrator.dispatch import Dispatch
from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.events import Event, Events, EventType
from stepfleet.orchestrator.protocol.claim import StepHint
from stepfleet.orchestrator.records.base import SCHEMA_VERSION
from stepfleet.orchestrator.records.errors import ErrorContext
from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.records.state import AgentState, Lifecycle, StateInfo
from stepfleet.orchestrator.store.calls import run_script
from stepfleet.orchestrator.store.connection import Connection
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.loading import MESSAGES, slim


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run to create. `config` is the digest of its stored configuration.

    `delay`: seconds before its first step may start.
    """

    run_id: str
    agent: str
    config: str
    messages: tuple[Message, ...]
    max_steps: int
    batch_id: str = ""
    row: int | None = None
    line_id: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    parent: str | None = None
    delay: float = 0.0


class Submission:
    """Writes new runs."""

    def __init__(
        self, connection: Connection, keys: Keys, dispatch: Dispatch, *, grace: float
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._dispatch = dispatch
        self._grace = grace

    async def create(self, run: NewRun) -> bool:
        """Create a run and make its first step due; return False if it was there already.

        Raises `StoreError` when Redis stays out of reach, or refuses because its memory is full.
        """
        try:
            return await self._create(run)
        except ResponseError as error:
            msg = f"Redis refuses a new run: {error}; raise its maxmemory, or remove ended runs"
            raise StoreError(msg) from None

    async def _create(self, run: NewRun) -> bool:
        hint = StepHint(run.run_id, 0)
        now = await self._connection.now()
        queued = _queued(run, now)
        reply = await run_script(
            self._connection,
            "create",
            self._keys.script_keys(run.run_id, self._dispatch.queue_key),
            run.run_id,
            round(self._grace * 1000),
            MESSAGES.dump_json(run.messages, exclude_defaults=True),
            self._dispatch.message(hint, run.agent),
            queued.to_json(),
            len(queued),
            round(run.delay * 1000),
            *_header(run, now),
        )
        return bool(reply == "created")

    async def publish(self, runs: Sequence[NewRun]) -> None:
        """Send the first hints of created runs where scripts do not push them."""
        if not self._dispatch.in_script:
            hints = [(StepHint(run.run_id, 0), run.agent) for run in runs if not run.delay]
            await self._dispatch.publish(hints)


# A default that holds a dict is copied deeply for each state; this one is shared.
_NONE = ErrorContext.none()


def _header(run: NewRun, now: datetime) -> list[Any]:
    info = StateInfo(id=run.run_id, execution_id=f"{run.run_id}:1", started_at=now, updated_at=now)
    state = AgentState(
        agent_id=run.run_id,
        parent_agent_id=run.parent,
        info=info,
        metadata=run.metadata,
        failures=_NONE,
    )
    fields = {
        "v": SCHEMA_VERSION,
        "agent": run.agent,
        "config": run.config,
        "overrides": orjson.dumps(run.overrides).decode() if run.overrides else "",
        "batch": run.batch_id,
        "row": "" if run.row is None else run.row,
        "line": run.line_id or "",
        "max_steps": run.max_steps,
        "slim": slim(state),
    }
    return [item for pair in fields.items() for item in pair]


def _queued(run: NewRun, now: datetime) -> Events:
    payload = {
        "status": Lifecycle.QUEUED.value,
        "step_count": 0,
        "error_message": None,
        "last_response": None,
    }
    return Events([Event(EventType.STATUS, run.run_id, f"{run.run_id}:1", now, payload)])
