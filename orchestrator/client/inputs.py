"""What is submitted: the input of a run, what else is given for it, or for a batch. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import UUID, uuid4

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.config import RunOverrides
from stepfleet.orchestrator.agents.prompt import worded
from stepfleet.orchestrator.batches.files.lines import (
    INPUT_LIMIT,
    AfterFailed,
    check_before,
    input_of,
    one_of,
    parse_input,
    parse_metadata,
    parse_tenant,
    stored_form,
)
from stepfleet.orchestrator.batches.files.source import Given, InputFormat
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.limits.limit import BATCH, RUN, Limit, own_limit, priority_of
from stepfleet.orchestrator.protocol.fold import (
    COUNT,
    OUTPUT,
    OUTPUTS,
    check_data,
    check_places,
    places_of,
)
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.base import well_formed
from stepfleet.orchestrator.records.calls.answers import After
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.run.facts import OriginKind, RunOrigin
from stepfleet.orchestrator.records.run.results import AgentRunResult, RunStatus
from stepfleet.orchestrator.store.batches.batches import run_id_for
from stepfleet.orchestrator.store.codec import EPOCH
from stepfleet.orchestrator.store.runs.submission import Submission
from stepfleet.orchestrator.tools.schemas.bounded_json import check_nesting

LONGEST_DELAY = 366 * 24 * 3600
_OF_FILES = ("input_field", "id_field", "input_format", "only_new")
Priority = Literal["high", "normal", "low"]
Input = str | Sequence[Message | Mapping[str, Any]] | Mapping[str, Any] | AgentRunResult
One = str | AgentRunResult
AfterRuns = One | Sequence[One] | Mapping[str, One]


class SubmitOptions(RunOverrides, total=False):
    """The options of `submit`."""

    run_id: UUID | str | None
    idempotency_key: str | None
    metadata: Mapping[str, Any] | None
    delay: float
    parent: UUID | str | None
    tenant: str | None
    priority: Priority | None
    limit: Limit | Mapping[str, Any] | None
    after: AfterRuns | None
    after_failed: AfterFailed


class BatchOptions(RunOverrides, total=False):
    """The options of `submit_batch` for the form of its source, and changes of all its runs."""

    input_field: str | None
    id_field: str | None
    input_format: InputFormat | None
    only_new: bool
    tenant: str | None
    priority: Priority | None
    limit: Limit | Mapping[str, Any] | None
    after: One | Sequence[One] | None


class RunOptions(SubmitOptions, total=False):
    """The options of `run`: those of `submit`, and a timeout in seconds."""

    timeout: float | None


def run_submission(agent: Agent | str, given: Input, options: Mapping[str, Any]) -> Submission:
    """Return a run to submit with `SubmitOptions`, checked.

    Raises `ConfigurationError` that names field and fix.
    """
    own = dict(options)
    delay, metadata = own.pop("delay", 0.0), own.pop("metadata", None)
    if not 0 <= delay <= LONGEST_DELAY:
        msg = f"delay is {delay}; write seconds from 0 to {LONGEST_DELAY:,}"
        raise ConfigurationError(msg)
    after = after_of(own.pop("after", None), own.pop("after_failed", "stop"), given)
    if after and delay:
        raise ConfigurationError("field 'delay': a run begins after others, or after a delay")
    run_id, key = own.pop("run_id", None), _checked_key(own.pop("idempotency_key", None))
    if None not in (run_id, key):
        raise ConfigurationError("run_id and idempotency_key both name the run; give one of them")
    parent = own.pop("parent", None)
    return Submission(
        given,
        run_id=run_id_for(key) if key else None if run_id is None else checked_id(run_id),
        metadata=parse_metadata(dict(metadata) if metadata else None),
        delay=delay,
        parent=None if parent is None else checked_id(parent, "parent"),
        after=after,
        **_of_both(RUN, agent, own),
    )


def batch_submission(
    source: Given,
    agent: Agent | str | None,
    options: Mapping[str, Any],
    agents: Mapping[str, Agent] | None = None,
    **given: Any,
) -> Submission:
    """Return a batch to submit with `BatchOptions`, checked; `given` are further fields.

    Raises `ConfigurationError` that names field and fix.
    """
    _checked_key(given.get("idempotency_key"))
    if (name := given.get("name")) and well_formed(name) is not name:
        msg = "field 'name' holds a lone surrogate, which is not valid Unicode; leave it out"
        raise ConfigurationError(msg)
    own = dict(options)
    before = ids_of(own.pop("after", None))
    return Submission(
        source,
        after=After(runs={one: one for one in before}) if before else None,
        **given,
        **{one: own.pop(one) for one in _OF_FILES if one in own},
        **_of_both(BATCH, agent, own, agents),
    )


def _of_both(
    kind: str,
    agent: Agent | str | None,
    own: dict[str, Any],
    agents: Mapping[str, Agent] | None = None,
) -> dict[str, Any]:
    """Return the fields that runs and batches have; what is left of `own` are overrides."""
    known = {key: one.config for key, one in (agents or {}).items()}
    if isinstance(agent, Agent):
        known[agent.name] = agent.config
    return {
        "agent": agent.name if isinstance(agent, Agent) else agent,
        "agents": known,
        "tenant": parse_tenant(own.pop("tenant", None)),
        "priority": priority_of(own.pop("priority", None)),
        "limit": own_limit(kind, own.pop("limit", None)),
        "overrides": own,
    }


def _checked_key(key: Any) -> str | None:
    if key is not None and not (isinstance(key, str) and key.strip()):
        raise ConfigurationError(f"idempotency_key is {key!r:.100}; write text, such as an order's")
    return key


def checked_id(run_id: object, field: str = "run_id") -> str:
    """Return a run id, a new one for None. Raises `ConfigurationError` unless it is a UUID."""
    if run_id is None:
        return str(uuid4())
    if isinstance(run_id, UUID):
        return str(run_id)
    if not isinstance(run_id, str):
        kind = type(run_id).__name__
        raise ConfigurationError(f"{field} is of type {kind}; write a UUID, or its text")
    try:
        return str(UUID(run_id))
    except ValueError:
        raise ConfigurationError(
            f"{field} {run_id!r:.100} is not a UUID; pass idempotency_key=... to submit(), which "
            "makes one of any text, or derive it: str(uuid.uuid5(uuid.NAMESPACE_URL, text))"
        ) from None


def messages_of(given: Input, prompt: str | None = None) -> tuple[Message, ...]:
    """Return an input as messages; a result becomes a user's message with its answer and data.

    The agent's `prompt` words dicts, and text as their field `input`. Raises
    `ConfigurationError` that names field and fix.
    """
    if isinstance(given, AgentRunResult):
        given = _answer(given)
    elif isinstance(given, Mapping):
        given = stored_form(dict(given), INPUT_LIMIT, "input")
    if isinstance(given, str | dict):
        return input_of(given, "input", prompt)
    other: Any = given
    if isinstance(other, Iterable) and not isinstance(other, bytes | bytearray):
        other = [
            one.model_dump(mode="json", exclude_defaults=True) if isinstance(one, Message) else one
            for one in other
        ]
    return parse_input(other, "input")


def origin_of(given: Input) -> RunOrigin | None:
    """Return where an input comes from: the run whose result it is, if it is one."""
    if isinstance(given, AgentRunResult):
        return RunOrigin(kind=OriginKind.RESULT, run_id=given.run_id)
    return None


def _answer(result: AgentRunResult) -> str:
    if result.status in (None, RunStatus.ERROR, RunStatus.CANCELLED):
        state = result.status or result.lifecycle
        msg = f"field 'input': run {result.run_id} is {state.value}; pass one that completed"
        raise ConfigurationError(msg)
    parts = [result.output] if result.output else []
    if result.structured is not None:
        parts.append(exact_json.text(result.structured))
    if not parts:
        msg = f"field 'input': run {result.run_id} has no output; pass one that has"
        raise ConfigurationError(msg)
    return "\n\n".join(parts)


def after_of(runs: AfterRuns | None, failed: Any, given: Any) -> After | None:
    """Return what a run waits for, with its input as `text` where that has places. Pure.

    Raises `ConfigurationError` that names the field.
    """
    failed = one_of(failed, "after_failed", AfterFailed)
    if runs is None:
        return None
    names = _named(runs)
    check_before(len(names))
    if isinstance(given, Mapping):
        check_nesting(given, "input")
        check_data(given, places_of(names))
    if not isinstance(given, str):
        return After(runs=names, failed=failed)
    check_places(given, places_of(names), required=False)
    return After(runs=names, text=given, failed=failed)


def ids_of(runs: One | Sequence[One] | None) -> tuple[str, ...]:
    """Return the ids of runs that a whole batch waits for. Pure; raises as `after_of`."""
    if runs is None:
        return ()
    if isinstance(runs, Mapping):
        raise ConfigurationError(
            "field 'after': lines have their own inputs; list runs by their ids"
        )
    names = _named(runs)
    check_before(len(names))
    return tuple(names)


def _named(runs: AfterRuns) -> dict[str, str]:
    if isinstance(runs, Mapping):
        for name in runs:
            _check_name(name)
        return {name: _id(one) for name, one in runs.items()}
    is_one = isinstance(runs, str | AgentRunResult) or not isinstance(runs, Iterable)
    ids = [runs] if is_one else list(runs)
    return {_id(one): _id(one) for one in ids}


def _id(one: Any) -> str:
    found = one.run_id if isinstance(one, AgentRunResult) else one
    if not isinstance(found, str) or not 0 < len(found) <= 200:  # noqa: PLR2004 - any id of a run
        raise ConfigurationError(f"field 'after' has {ascii(found)[:70]}; name runs by their ids")
    return found


def _check_name(name: Any) -> None:
    text = ascii(name)[:70]
    try:
        is_place = isinstance(name, str) and worded(f"{{{name}}}", {name: "x"}) == "x"
    except (ConfigurationError, ValueError):
        is_place = False
    if not is_place or name in (OUTPUT, OUTPUTS, COUNT) or name != name.strip():
        msg = f"field 'after' has the name {text}, which cannot be a place in an input"
        raise ConfigurationError(f"{msg}; write a word of your own, such as 'facts'")


def time_given(field: str, given: datetime | str | None) -> datetime | None:
    """Return a time; one without a zone is UTC."""
    try:
        at = datetime.fromisoformat(given) if isinstance(given, str) else given
        at = at.replace(tzinfo=UTC) if at and at.tzinfo is None else at
        return max(at.astimezone(UTC), EPOCH) if at else None
    except (ValueError, OverflowError):
        msg = f"{field} is {ascii(given)[:60]}; write a time: 2026-11-23 or 2026-11-23T08:30Z"
        raise ConfigurationError(msg) from None
