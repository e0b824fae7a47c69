"""Counts a batch's failures by their cause. Memory is bounded, however many runs and causes."""

from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import Field

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.batch import Manifest
from stepfleet.orchestrator.records.errors import Cause
from stepfleet.orchestrator.records.run.facts import FailedRun, explains
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.records.state import NOT_COMPLETED, Lifecycle
from stepfleet.orchestrator.store.batches.batches import Batches, pages_of
from stepfleet.orchestrator.store.runs.reading import RunReader

ROWS = 2_000
"""Rows whose statuses, and failures, are read at once."""
MOST_GROUPS = 500
MOST_KINDS = 50
LONGEST = 1_000
"""Characters of an example's text."""
K = TypeVar("K")


class FailureGroup(Record):
    """The runs that did not complete for one cause.

    `steps`, `models` and `stop_reasons` count the runs by the failed step, the agent's model and
    the stop reason, the most frequent first. `example` is the first such run. `limits` are the
    limits that stopped some of them, with twice the highest value: a retry must raise them.
    """

    cause: Cause
    runs: int
    steps: dict[int, int] = Field(default_factory=dict)
    models: dict[str, int] = Field(default_factory=dict)
    stop_reasons: dict[str, int] = Field(default_factory=dict)
    example: FailedRun
    limits: dict[str, int | float] = Field(default_factory=dict)

    @property
    def where(self) -> str:
        """The condition that selects exactly these runs: for `batch.retry(where=...)`."""
        return f"cause={self.cause.key}"


class Failures(Record):
    """A batch's runs that did not complete, by cause, the most frequent first.

    Without a `batch_id` it is about the newest runs of the fleet. `not_completed` is how many there
    are, `read` how many were read, `ungrouped` how many of these belong to none of the `groups`, of
    which there are at most 500.
    """

    batch_id: str
    not_completed: int
    read: int
    groups: tuple[FailureGroup, ...] = ()
    ungrouped: int = 0


@dataclass(slots=True)
class _Group:
    """The counts of one cause so far."""

    example: FailedRun
    runs: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    models: dict[str, int] = field(default_factory=dict)
    stop_reasons: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int | float] = field(default_factory=dict)

    def add(self, run: FailedRun) -> None:
        self.runs += 1
        _count(self.steps, run.step)
        _count(self.models, run.model)
        _count(self.stop_reasons, run.stop_reason.value)
        for name, value in run.limits.items():
            self.limits[name] = max(value, self.limits.get(name, 0))


class FailureCount:
    """Counts runs by cause as they come."""

    def __init__(self) -> None:
        self.read = 0
        self._groups: dict[str, _Group] = {}

    def add(self, run: FailedRun) -> None:
        """Count a run."""
        self.read += 1
        group = self._groups.get(run.cause.key)
        if group is None:
            if len(self._groups) >= MOST_GROUPS:
                return
            example = run.model_copy(update={"text": run.text[:LONGEST]})
            group = self._groups[run.cause.key] = _Group(example)
        group.add(run)

    def failures(self, batch_id: str, not_completed: int) -> Failures:
        """Return the counts."""
        groups = [
            FailureGroup(
                cause=one.example.cause,
                runs=one.runs,
                steps=_sorted(one.steps),
                models=_sorted(one.models),
                stop_reasons=_sorted(one.stop_reasons),
                example=one.example,
                limits=one.limits,
            )
            for one in sorted(self._groups.values(), key=lambda one: -one.runs)
        ]
        return Failures(
            batch_id=batch_id,
            not_completed=not_completed,
            read=self.read,
            groups=tuple(groups),
            ungrouped=self.read - sum(one.runs for one in groups),
        )


async def failed_in(
    manifest: Manifest,
    batches: Batches,
    runs: RunReader,
    on_rows: Callable[[int], None],
    wanted: Collection[Lifecycle] = NOT_COMPLETED,
) -> AsyncGenerator[list[FailedRun]]:
    """Yield the runs of `wanted` end states, page by page; `on_rows` gets the rows so far."""
    rows = 0
    for run_ids in pages_of(manifest.batch_id, manifest.rows, ROWS):
        if ended := await batches.in_states(run_ids, wanted):
            yield await runs.failed(ended)
        on_rows(rows := rows + len(run_ids))


def failure_of(result: AgentRunResult) -> FailedRun | None:
    """Return a result as a failure; None for a run that is active or completed."""
    cause, reason = result.cause, result.stop_reason
    if cause is None or reason is None:
        return None
    why = explains(reason, result.last_error)
    return FailedRun(
        run_id=result.run_id,
        line_id=result.line_id,
        agent=result.agent_name,
        model=result.model or "",
        stop_reason=reason,
        step=why.step if why else result.steps_used,
        text=why.message if why else result.error or "",
        cause=cause,
    )


def _count(counts: dict[K, int], key: K) -> None:
    """Count a key; beyond `MOST_KINDS` of them only those that are known."""
    if key in counts or len(counts) < MOST_KINDS:
        counts[key] = counts.get(key, 0) + 1


def _sorted(counts: dict[K, int]) -> dict[K, int]:
    return dict(sorted(counts.items(), key=lambda one: -one[1]))
