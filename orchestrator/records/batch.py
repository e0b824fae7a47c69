"""The manifest of a batch, and its progress as the sum over shards. Pure."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Self

import orjson
from pydantic import Field

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.errors import Cause
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.records.steps import FinishReason

BatchFormat = Literal["stepfleet", "openai"]

NANO = 1_000_000_000
SILENCE = timedelta(seconds=30)
UNKNOWN_SILENCE = timedelta(minutes=10)


class FollowUp(Record):
    """What a batch that follows another one is to do with its results.

    `input` is worded for each result, or, with a `page`, for each page of rows. `until_one` does
    the same with the results of that until one run is left. `config` is the digest of the agent's
    configuration; `overrides` are those of all runs, in stored form.
    """

    agent: str
    config: str
    input: str
    page: int | None = None
    until_one: bool = False
    after_failed: Literal["skip", "stop"] = "skip"
    overrides: dict[str, Any] = Field(default_factory=dict)
    tenant: str | None = None
    priority: int = 1


class BatchHold(Record):
    """Why a batch is held: `runs` of it ended in a row with the same permanent error.

    `message` is that of the last of them.
    """

    runs: int
    cause: Cause
    message: str

    def __str__(self) -> str:
        """Return the reason in words."""
        return f"{self.runs} runs in a row failed with the same error: {self.message}"


class Manifest(Record):
    """A batch as a whole. `rows` counts its input lines, `total` those that became runs.

    Row numbers run from 0 to `rows` - 1, with a gap for each line that was skipped. `sealed`
    is true once every run was created, and `cancel_requested` once the batch was cancelled as a
    whole: no more runs are created then. `submitting` is when the submitter was last seen.
    `path` is the file that it was made from, where it was one.
    `digest` is the content address of lines, agents and overrides. Once all runs have ended,
    `final` holds the counters of that time, and `expires` is the end of the runs' retention.
    `held` is set while equal errors hold the batch.
    A batch with a `plan` begins when the batch that it `follows` has ended; `level` counts the
    batches in between, `left_out` the runs before without a result, and `refused` says why nothing
    was submitted. `next` are those that follow. `archived`: runs of it are in the archive.
    """

    batch_id: str
    key: str
    digest: str
    name: str = ""
    path: str = ""
    agent: str = ""
    format: BatchFormat = "stepfleet"
    created: datetime
    total: int
    rows: int
    sealed: bool = False
    cancel_requested: bool = False
    submitting: datetime | None = None
    final: dict[str, int] | None = None
    expires: datetime | None = None
    held: BatchHold | None = None
    follows: str | None = None
    plan: FollowUp | None = None
    level: int = 0
    refused: str | None = None
    left_out: int = 0
    next: tuple[str, ...] = ()
    archived: bool = False

    def to_fields(self) -> dict[str, str]:
        """Return the fields of a new batch's hash; scripts write the others."""
        fields = {name: str(getattr(self, name)) for name in _PLAIN}
        fields |= {"follows": self.follows} if self.follows else {}
        fields |= {"plan": self.plan.to_json()} if self.plan else {}
        return fields | {f"{_NEXT}{one}": "1" for one in self.next}

    @classmethod
    def from_fields(cls, batch_id: str, fields: Mapping[str, str]) -> Self:
        """Read a stored manifest. Raises `pydantic.ValidationError` on anything else."""
        values: dict[str, Any] = {name: fields[name] for name in _PLAIN if name in fields}
        if fields.get("final"):
            values["final"] = orjson.loads(fields["final"])
        if fields.get("held"):
            values["held"] = orjson.loads(fields["held"].partition(" ")[2])
        if fields.get("submitting"):
            values["submitting"] = datetime.fromtimestamp(float(fields["submitting"]), UTC)
        if fields.get("expires"):
            values["expires"] = datetime.fromtimestamp(int(fields["expires"]) / 1000, UTC)
        if fields.get("plan"):
            values["plan"] = orjson.loads(fields["plan"])
        values |= {name: fields[name] for name in _FOLLOWING if name in fields}
        following = (one.removeprefix(_NEXT) for one in fields if one.startswith(_NEXT))
        values |= {
            "next": tuple(sorted(following)),
            "batch_id": batch_id,
            "created": datetime.fromtimestamp(int(fields.get("created", "0")) / 1000, UTC),
            "sealed": fields.get("sealed") == "1",
            "cancel_requested": fields.get("cancelled") == "1",
            "archived": fields.get("archived") == "1",
        }
        return cls.model_validate(values)


_NEXT = "next:"
_FOLLOWING = ("follows", "level", "refused", "left_out")
_PLAIN = ("key", "digest", "name", "path", "agent", "format", "total", "rows")


class BatchProgress(Record):
    """The progress of a batch. Every number comes from the runs' own commits; none is a guess.

    `tokens` and `cost_usd` are of committed steps. `default_priced_usd` is the part of the cost by
    the default price, since no table has the model. `cut_answers` and `filtered_answers` are those
    of completed runs that were cut at the token limit, or by the provider's filter. `lost` counts
    attempts whose work was not committed. `total` is the number of valid input lines, also while
    they are submitted. `submitted` counts the runs that were created; `submission_stalled` is true
    when some were not and their submitter is gone, `cancel_requested` when the whole batch was
    cancelled.
    `past_retention` counts runs that ended and whose records have been removed since; they stay
    in all other numbers where the batch ended as a whole. While `held` is set, equal permanent
    errors have paused the batch until it is resumed.
    A batch that `follows` another one begins when that has ended, and has no runs before; `refused`
    says why it has none at all, and `left_out` counts the runs of that one without a result.
    `next` are the batches that follow this one.
    """

    batch_id: str
    name: str = ""
    agent: str = ""
    format: BatchFormat = "stepfleet"
    created: datetime
    sealed: bool
    total: int
    queued: int = 0
    in_progress: int = 0
    paused: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    stopped: int = 0
    by_reason: dict[str, int] = Field(default_factory=dict)
    steps: int = 0
    tokens: int = 0
    llm_calls: int = 0
    cost_usd: float = 0.0
    default_priced_usd: float = 0.0
    cut_answers: int = 0
    filtered_answers: int = 0
    lost: int = 0
    past_retention: int = 0
    submitted: int = 0
    cancel_requested: bool = False
    submission_stalled: bool = False
    held: BatchHold | None = None
    follows: str | None = None
    refused: str | None = None
    left_out: int = 0
    next: tuple[str, ...] = ()

    @property
    def done(self) -> int:
        """How many runs have ended."""
        return self.completed + self.failed + self.cancelled + self.stopped

    @property
    def open(self) -> int:
        """How many runs have been created and not ended."""
        return self.queued + self.in_progress + self.paused

    @property
    def ok(self) -> bool:
        """Whether all runs were created, have ended and completed, and are still there."""
        is_whole = self.completed == self.total and not self.past_retention
        is_over = self.sealed and not self.open and not self.refused
        return is_over and self.done == self.completed and is_whole

    @property
    def ended(self) -> bool:
        """Whether all runs have ended, and no more will be created."""
        return (self.sealed or self.cancel_requested) and not self.open

    @property
    def over(self) -> bool:
        """Whether nothing more happens by itself: ended, held, or its submitter is gone."""
        is_left = self.submission_stalled and not self.open
        return self.ended or is_left or self.halted

    @property
    def halted(self) -> bool:
        """Whether the batch is held, and no run of it is in progress any more."""
        return self.held is not None and self.open > 0 and not self.in_progress

    @property
    def held_text(self) -> str:
        """Why the batch is held, and what to do; empty where it is not."""
        if self.held is None:
            return ""
        again = f"stepfleet resume --batch {self.batch_id}"
        retry = f"stepfleet retry --batch {self.batch_id} --failed"
        return f"held: {self.held}. Fix it, then: {again}; and for those that failed: {retry}"

    @property
    def share(self) -> float:
        """The part of all runs that has ended, 0 to 1."""
        empty = 0.0 if self.waits else 1.0
        return min(self.done / self.total, 1.0) if self.total else empty

    @property
    def waits(self) -> bool:
        """Whether the batch that it follows has not ended, or its runs are not all created."""
        return self.follows is not None and not self.sealed and not self.cancel_requested


class BatchPage(Record):
    """Some batches, the newest first. `next` is the cursor of the next page, None at the end."""

    batches: tuple[BatchProgress, ...] = ()
    next: str | None = None


def summed(shards: Iterable[Mapping[str, str]]) -> dict[str, int]:
    """Return the sums of counters by name."""
    sums: dict[str, int] = {}
    for counters in shards:
        for name, value in counters.items():
            sums[name] = sums.get(name, 0) + int(value)
    return sums


def is_stalled(manifest: Manifest, now: datetime) -> bool:
    """Return whether a batch's submitter was silent long enough to count as gone."""
    if manifest.sealed or manifest.cancel_requested or manifest.follows:
        return False  # workers submit what follows a batch
    if manifest.submitting is None:  # of an older version, which does not note it
        return now - manifest.created > UNKNOWN_SILENCE
    return now - manifest.submitting > SILENCE


def progress_of(
    manifest: Manifest, shards: Iterable[Mapping[str, str]], now: datetime | None = None
) -> BatchProgress:
    """Return the sum of the shards' counters; past retention, the last known ones."""
    sums = summed(shards)
    past = max(manifest.total - sums.get("total", 0), 0) if manifest.sealed else 0
    if past and manifest.final:
        sums = manifest.final
    reasons = {
        name.removeprefix("reason:"): count
        for name, count in sorted(sums.items())
        if name.startswith("reason:") and count
    }
    shared = BatchProgress.model_fields.keys() & Manifest.model_fields.keys()
    values: dict[str, Any] = {name: getattr(manifest, name) for name in shared}
    values |= {one.value: sums.get(f"status:{one.value}", 0) for one in Lifecycle}
    return BatchProgress(
        **values,
        by_reason=reasons,
        steps=sums.get("steps", 0),
        tokens=sums.get("tokens", 0),
        llm_calls=sums.get("calls", 0),
        cost_usd=sums.get("cost", 0) / NANO,
        default_priced_usd=sums.get("guessed", 0) / NANO,
        cut_answers=sums.get(f"shortened:{FinishReason.LENGTH}", 0),
        filtered_answers=sums.get(f"shortened:{FinishReason.CONTENT_FILTER}", 0),
        lost=sums.get("lost", 0),
        past_retention=past,
        submitted=sums.get("total", 0),
        submission_stalled=now is not None and is_stalled(manifest, now),
    )
