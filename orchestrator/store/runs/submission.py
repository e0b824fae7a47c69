"""Creates runs, also ones with a history; submitting the same thing twice changes nothing.

What a caller submits is one `Submission` from there to here; each of its runs is a `NewRun`.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson
from pydantic_core import to_jsonable_python
from redis.exceptions import ResponseError

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.errors import ConfigurationError, ConflictError, StoreError
from stepfleet.orchestrator.events.envelope import Event, Events, EventType, status_payload
from stepfleet.orchestrator.limits.limit import NORMAL, Limit
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.protocol.serialization import handoff
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.base import SCHEMA_VERSION
from stepfleet.orchestrator.records.calls.answers import After
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.run.facts import RunOrigin
from stepfleet.orchestrator.records.state import AgentState, Lifecycle
from stepfleet.orchestrator.store.codec import (
    MESSAGES,
    log_end,
    status_event,
    stored_events,
    stored_model,
)
from stepfleet.orchestrator.store.compression import unpacked
from stepfleet.orchestrator.store.gateway import Gateway, Opened
from stepfleet.orchestrator.store.lua import flat, run_script
from stepfleet.orchestrator.store.pace import SweepPace

PAGE_FIELDS, PAGE_BYTES = 400, 256 * 1024
"""The part of a log that one script writes, while Redis serves nobody else; the rest is staged."""
STAGED_SECONDS = 600
"""How long a staged page waits for the next, where a client has died."""
_TRIES = 3
_STAGED = ("log", "outcomes", "lost")
_AT_WORK = (Lifecycle.QUEUED, Lifecycle.IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class Submission:
    """What a caller submits, a run or a batch: checked where it is given, and the same from there.

    `source` is the input, or what the lines come from. `agent` names the run's agent, or that of
    lines that name none; `agents` are those given as code, by name. `overrides` change their
    configurations. Of a batch, `after` are runs that all lines wait for, and `tenant` is that of
    lines that name none.
    """

    source: Any = None
    agent: str | None = None
    agents: Mapping[str, AgentConfig] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    tenant: str | None = None
    priority: int = NORMAL
    limit: Limit | None = None
    after: After | None = None
    # Of a run:
    run_id: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    delay: float = 0.0
    parent: str | None = None
    # Of a batch:
    idempotency_key: str | None = None
    name: str | None = None
    input_format: Any = None
    input_field: str | None = None
    id_field: str | None = None
    only_new: bool = False
    skip_invalid: bool = False
    on_progress: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run to create. `config` is the digest of its stored configuration.

    `delay`: seconds before its first step may start. `limited`: it, or its batch, has a limit of
    its own. `returns_to`: the call that waits for its end. `depth`: how many runs
    are above it, each started by a call of the one before. `after`: the runs whose ends it waits
    for. `billed`: the batch that pays for a run above it. `is_named`: a caller chose its id, which
    may be that of a run of another input. `model`: what its agent calls first.
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
    origin: RunOrigin | None = None
    tenant: str | None = None
    priority: int = NORMAL
    limited: bool = False
    returns_to: Work | None = None
    depth: int = 0
    after: After | None = None
    billed: str | None = None
    is_named: bool = False
    model: str = ""


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """A run to create with a history.

    `log`, `outcomes` and `lost` are fields as they are stored; `step` is the step at which the
    run goes on, or stands. `header` are further fields of the header (times in milliseconds).
    """

    run: NewRun
    state: AgentState
    step: int
    log: Mapping[str, str]
    outcomes: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    header: Mapping[str, Any] = field(default_factory=dict)


def given_of(run: NewRun) -> str:
    """Return the digest of what makes a run another one: its agent, input and overrides."""
    after = run.after.to_json() if run.after else ""
    messages = MESSAGES.dump_json(run.messages, exclude_defaults=True).decode()
    parts = [run.agent, messages, run.overrides, after]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class RunSubmission(Gateway):
    """Writes new runs, and runs with a history: each by one call, whose long parts are staged."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._due = [opened.keys.due(shard) for shard in range(opened.keys.shards)]
        self._most = opened.settings.max_active_runs
        self._pace = SweepPace(opened.connection)

    async def room(self) -> int | None:
        """Return how many runs may be created now; None for any number. Raises `StoreError`."""
        if self._most is None:
            return None
        sizes = await self._connection.execute_all(*(("ZCARD", key) for key in self._due))
        return max(self._most - sum(map(int, sizes)), 0)

    async def require_room(self) -> None:
        """Raise `StoreError` while as many runs are active as there may be."""
        if await self.room() == 0:
            msg = f"max_active_runs is {self._most:,}, and as many are active: submit it later"
            raise StoreError(msg)

    async def create(self, run: NewRun) -> bool:
        """Create a run and make its first step due; return False if it was there already.

        Raises `StoreError` when Redis stays out of reach, or refuses because its memory is full,
        `ConfigurationError` where the run's batch was cancelled as a whole, and `ConflictError`
        where a run with an id that its caller chose is of another input.
        """
        call = self._call(run, await self._connection.now(), _made())
        try:
            return _is_new(run, await run_script(self._connection, *call))
        except ResponseError as error:
            raise _refused(error) from None

    async def create_all(self, runs: Sequence[NewRun]) -> list[bool]:
        """Create runs whose commands travel together; tell of each whether it is new.

        Raises `StoreError` as `create` does; what was created by then stays.
        """
        now, made, created = await self._connection.now(), _made(), list[bool]()
        for group in self._pace.groups(runs):
            try:
                replies = await self._pace.send([self._call(run, now, made) for run in group])
            except ResponseError as error:
                raise _refused(error) from None
            created += map(_is_new, group, replies)
        return created

    async def submit_all(self, runs: Sequence[NewRun]) -> int:
        """Create runs and send the first hints of new ones; return how many are there then."""
        created = zip(runs, await self.create_all(runs), strict=True)
        await self.publish([run for run, is_new in created if is_new])
        return len(runs)

    def _call(self, run: NewRun, now: datetime, made: str) -> tuple[Any, ...]:
        queued = _queued(run, now)
        return self._pushing.call(
            "create",
            run.run_id,
            round(self._settings.grace * 1000),
            MESSAGES.dump_json(run.messages, exclude_defaults=True),
            self._dispatch.message(Work(run.run_id, 0), run.agent),
            stored_events(queued),
            len(queued),
            round(run.delay * 1000),
            **header_of(run, first_handoff(run, now)),
            made=made,
            **({"given": given_of(run)} if run.is_named else {}),
        )

    async def publish(self, runs: Sequence[NewRun]) -> None:
        """Send the first hints of created runs where scripts do not push them."""
        if not self._dispatch.in_script:
            hints = [(Work(run.run_id, 0), run.agent) for run in runs if not run.delay]
            await self._dispatch.publish(hints)

    async def adopt(self, imported: ImportedRun) -> bool:
        """Create the run; return False if the very same was created before.

        Raises `ConflictError` if another run has its id, `StoreError` when Redis stays out
        of reach or refuses because its memory is full.
        """
        run, state = imported.run, imported.state
        try:
            outcome = await self._adopt(imported)
        except ResponseError as error:
            raise _refused(error) from None
        if outcome == "exists":
            msg = (
                f"a run of the id {run.run_id} is there already; "
                "choose another id (uuid.uuid4()) for this one"
            )
            raise ConflictError(msg)
        # Also after a repetition, whose first reply was lost: a second hint does no harm.
        if state.status in _AT_WORK:
            await self._dispatch.published(Work(run.run_id, imported.step), run.agent)
        return outcome == "created"

    async def _adopt(self, imported: ImportedRun) -> str:
        run, state = imported.run, imported.state
        header = flat({**header_of(run, handoff(state)), **imported.header})
        if since := log_end(state.window):
            header += ["since", since]
        log, outcomes = imported.log, imported.outcomes
        parts = [header, *map(flat, (log, outcomes, imported.lost))]
        # Other releases may pack the same records in another way.
        content = [header, *(flat(_plain(part)) for part in (log, outcomes)), parts[3]]
        digest = _digest(content)
        events = status_event(state, state.status, await self._connection.now())
        # Again where a staged page has expired, or another call for the same run took the pages.
        for _ in range(_TRIES):
            counts = [len(header), *await self._stage_all(run.run_id, digest, parts)]
            (outcome,) = await self._pushing.run(
                "adopt",
                run.run_id,
                digest,
                state.status.value,
                imported.step,
                round(self._settings.grace * 1000),
                self._settings.lifetime,
                self._dispatch.message(Work(run.run_id, imported.step), run.agent),
                stored_events(events),
                len(events),
                *counts,
                *(one for part, n in zip(parts, counts, strict=True) if n > 0 for one in part),
            )
            if outcome != "missing":
                return str(outcome)
        msg = f"the log of the new run {run.run_id} does not stay in Redis; try again"
        raise StoreError(msg)

    async def _stage_all(
        self, run_id: str, digest: str, parts: Sequence[Sequence[Any]]
    ) -> list[int]:
        """Stage long parts; return the number of values of each part, of a staged one -fields."""
        counts = []
        for name, part in zip(_STAGED, parts[1:], strict=True):
            parted = list(pages(part))
            for page in parted if len(parted) > 1 else ():
                lifetime = STAGED_SECONDS * 1000
                await self._scripts.run("stage", run_id, digest, name, lifetime, *page)
            counts.append(-len(part) // 2 if len(parted) > 1 else len(part))
        return counts


def _is_new(run: NewRun, reply: Any) -> bool:
    """Return what the script says of a run. Raises as `create`."""
    if reply == "cancelled":
        msg = (
            f"batch {run.batch_id} was cancelled: no more runs of it are created; submit these "
            "lines with another idempotency key"
        )
        raise ConfigurationError(msg)
    if reply == "other":
        msg = (
            f"run {run.run_id} is there already, and is of another agent, input or overrides;"
            " use another run_id, or idempotency_key, for another run"
        )
        raise ConflictError(msg)
    return bool(reply == "created")


def _refused(error: ResponseError) -> StoreError:
    return StoreError(
        f"Redis refuses a new run: {error}; raise its maxmemory, or remove ended runs"
    )


def _made() -> str:
    return secrets.token_hex(4)


def first_handoff(run: NewRun, now: datetime) -> str:
    """Return the hand-off form of the state that a run begins with.

    Written directly: to make the state and leave out its defaults takes ten times as long.
    """
    info = {"id": run.run_id, "execution_id": f"{run.run_id}:1"}
    state: dict[str, Any] = {
        "agent_id": run.run_id,
        "info": {**info, "started_at": now, "updated_at": now},
    }
    if run.parent is not None:
        state["parent_agent_id"] = run.parent
    if run.metadata:
        state["metadata"] = run.metadata
    return exact_json.text(state, default=to_jsonable_python, option=orjson.OPT_UTC_Z)


def header_of(run: NewRun, handoff: str) -> dict[str, Any]:
    """Return the header of a new run; `handoff` holds its state."""
    fields = {
        "v": SCHEMA_VERSION,
        "agent": run.agent,
        "config": run.config,
        "overrides": exact_json.text(run.overrides) if run.overrides else "",
        "batch": run.batch_id,
        "row": "" if run.row is None else run.row,
        "line": run.line_id or "",
        "max_steps": run.max_steps,
        "slim": handoff,
    }
    if run.model:
        fields["model"] = stored_model(run.config, run.model)
    if run.origin is not None:
        fields["origin"] = run.origin.to_json()
    if run.tenant is not None:
        fields["tenant"] = run.tenant
    if run.priority != NORMAL:
        fields["priority"] = run.priority
    if run.limited:
        fields["limited_by"] = "own"
    if run.parent is not None:
        fields["parent"] = run.parent
    if run.billed is not None:
        fields["billed"] = run.billed
    if run.returns_to is not None:
        fields |= {"depth": run.depth, "returns": "1", "returns_to": address_of(run.returns_to)}
    if run.after is not None:
        fields |= {"after": run.after.to_json(), "ahead": len(run.after.ids)}
    return fields


def address_of(call: Work) -> str:
    """Return how the store names a call that waits for the end of another run."""
    return f"{call.step} {call.index} {call.run_id}"


def call_at(address: str) -> Work:
    """Return the call of such an address."""
    step, index, run_id = address.split(" ", 2)
    return Work(run_id, int(step), int(index))


def _queued(run: NewRun, now: datetime) -> Events:
    payload = status_payload(Lifecycle.QUEUED.value, before=None, steps=0)
    payload |= {"tenant": run.tenant} if run.tenant else {}
    execution = f"{run.run_id}:1"
    return Events([Event(EventType.STATUS, run.run_id, execution, now, payload, run.parent)])


def pages(part: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield field, value, ... in pages that one script may write, each with one pair at least."""
    begin = size = 0
    for at in range(0, len(part), 2):
        own = len(part[at]) + len(part[at + 1])
        if at > begin and (size + own > PAGE_BYTES or at - begin >= 2 * PAGE_FIELDS):
            yield part[begin:at]
            begin, size = at, 0
        size += own
    if part:
        yield part[begin:]


def _plain(stored: Mapping[str, str]) -> dict[str, bytes]:
    return {name: unpacked(value) for name, value in stored.items()}


def _digest(parts: list[list[Any]]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for value in part:
            digest.update(value if isinstance(value, bytes) else str(value).encode())
            digest.update(b"\0")
    return digest.hexdigest()[:32]
