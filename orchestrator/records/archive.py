"""The archive in numbers: what was moved, how it stands, what reading it back has found."""

from datetime import datetime

from stepfleet.orchestrator.records.base import Record


class Archived(Record):
    """What was moved: `runs`, in `files` of so many `bytes`. `left` runs had to stay for now."""

    runs: int = 0
    files: int = 0
    bytes: int = 0
    left: int = 0

    def __add__(self, other: "Archived") -> "Archived":
        return Archived(
            runs=self.runs + other.runs,
            files=self.files + other.files,
            bytes=self.bytes + other.bytes,
            left=self.left + other.left,
        )


class ArchiveFigures(Record):
    """The archive at one moment. `runs` and `bytes` were moved there in all, in `files` by now.

    `url`, without credentials, is where further ones go, if any. `due_runs`, without a batch, and
    `due_batches` are to go, the first of them for `overdue_seconds`. `error` is what the last try
    met, `failing_since` when the first of the tries in a row that failed, `failing_seconds` ago.
    """

    url: str | None = None
    runs: int = 0
    bytes: int = 0
    files: int = 0
    due_runs: int = 0
    due_batches: int = 0
    overdue_seconds: float = 0.0
    error: str | None = None
    failing_since: datetime | None = None
    failing_seconds: float = 0.0


class ArchiveDamage(Record):
    """A file of the archive that is missing or damaged, `why`, and the runs that are only there.

    `run_ids` is empty after the first hundred files; `runs` is how many runs it was written with.
    """

    file: str
    url: str
    why: str
    runs: int
    run_ids: tuple[str, ...] = ()


class ArchiveVerification(Record):
    """What reading all files of the archive back has found: `runs` can be read."""

    files: int = 0
    runs: int = 0
    bytes: int = 0
    damaged: tuple[ArchiveDamage, ...] = ()
