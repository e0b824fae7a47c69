"""What the API answers, as records: its OpenAPI document is made from them. Pure."""

from typing import Any

from pydantic import Field

from stepfleet.orchestrator.batches.failures import Failures
from stepfleet.orchestrator.records.audit import AuditEntry
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.records.calls.answers import Ask, AskCount
from stepfleet.orchestrator.store.fleet.checks import Check
from stepfleet.orchestrator.store.fleet.overview import FleetOverview, KeeperSeen, WorkerSeen
from stepfleet.orchestrator.store.limits import LimitUse, LimitWaits


class Problem(Record):
    """Why a request was refused: what is wrong, and what to write. `field` is its parameter."""

    error: str
    field: str | None = None


class BatchReport(Record):
    """A batch: its progress, and its runs that did not complete by cause, where there are any.

    `waits` are limits for which runs of it wait: of up to 500 runs that are spread over the batch.
    `asks` are calls of its runs, and of runs below these, that wait for people.
    """

    progress: BatchProgress
    failures: Failures | None = None
    waits: tuple[LimitWaits, ...] = ()
    asks: AskCount = AskCount()


class SubmissionResult(Record):
    """A batch that was submitted from a file. `is_new` is false where it had been before.

    `runs` is how many runs it has, `skipped` how many bad lines were left out; `cancelled`: the
    batch was cancelled, and nothing more of it is created.
    """

    batch_id: str
    is_new: bool
    runs: int
    skipped: int = 0
    cancelled: bool = False


class FleetReport(Record):
    """The fleet. `checks` are those of `stepfleet doctor`, each with its fix where it has failed.

    `limits_problem` is why limits cannot be read, where that is so.
    """

    overview: FleetOverview
    limits: tuple[LimitUse, ...] = ()
    limits_problem: str = ""
    checks: tuple[Check, ...] = ()


class WorkersReport(Record):
    """The workers, what is wrong with them, and the keepers, which do no steps."""

    workers: tuple[WorkerSeen, ...] = ()
    keepers: tuple[KeeperSeen, ...] = ()
    checks: tuple[Check, ...] = ()


class Change(Record):
    """The body of an action. `overrides` are fields of the configuration, where a run goes on.

    `message` is what a run is given by `send`, or by `fork` in place of what it was given after
    its first `at` steps.

    For a batch, `where` selects the runs of a retry as `batch.retry` does, and `filter` (`status`,
    `stop_reason`, `agent`, `tenant`, `error`) those of any action: a page of them at a time, after
    `cursor`. Without them an action concerns the whole batch. For several runs, `runs` are their
    ids, or `filter` has conditions as those of the list.
    """

    overrides: dict[str, Any] = Field(default_factory=dict)
    message: str | None = None
    at: int | None = None
    where: str | None = None
    runs: tuple[str, ...] | None = Field(default=None, max_length=500)
    filter: dict[str, str] | None = None
    cursor: str | None = None


class ActionResult(Record):
    """What an action has done. `runs` is how many runs it concerned; `outcome` that of one run.

    `text` has the outcome in words that follow the run's name.

    `left_alone` counts runs that were refused; `refused` has up to 20 of them, with the reason.
    `next` is the cursor for the next request where a filter may match more runs.
    """

    action: str
    runs: int = 0
    outcome: str | None = None
    detail: str | None = None
    text: str | None = None
    left_alone: int = 0
    refused: dict[str, str] = Field(default_factory=dict)
    next: str | None = None


class AuditPage(Record):
    """The newest actions."""

    entries: tuple[AuditEntry, ...]


class WaitingCall(Record):
    """A call that waits for a person. Equal calls have the same `group`."""

    ask: Ask
    group: str
    is_hidden: bool = False
    """Its arguments are not shown here."""


class WaitingPage(Record):
    """Calls that wait for people, the oldest first; `next` is the next page's cursor.

    `total` is how many wait in the whole fleet, with those of runs that were cancelled lately.
    """

    waiting: tuple[WaitingCall, ...] = ()
    next: str | None = None
    total: int = 0
