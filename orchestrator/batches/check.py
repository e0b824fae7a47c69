"""Looks at every line of a batch before any becomes a run, in constant memory.

All problems are found in one reading; ids that occur twice too. Knows no Redis.
"""

import contextlib
import hashlib
import re
import sqlite3
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from stepfleet.orchestrator.batches.files.openai_format import RawLine
from stepfleet.orchestrator.batches.files.source import BatchInput
from stepfleet.orchestrator.batches.plan import Draft, Plan
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.batch import BatchFormat

SHOWN = 20
SAME_SHOWN = 3
_FIELD = re.compile(r"field '([^']{1,200})'")


class LineProblem(Record):
    """What is wrong with a line of a batch, and the fix. `unit` is what `line` counts, from 1.

    `field` is the field that the text names, where it names one.
    """

    unit: str
    line: int
    field: str | None = None
    text: str

    def __str__(self) -> str:
        """Return it in one sentence."""
        return f"{self.unit} {self.line}: {self.text}"


class BatchCheck(Record):
    """What a submission would find: lines in all, good and bad ones, and the first problems.

    `agents` are those of the good lines. `batch_id` is the batch's id; `known` is how many of its
    runs are there already, 0 for a new batch.
    """

    lines: int
    good: int
    bad: int
    problems: tuple[LineProblem, ...] = ()
    agents: tuple[str, ...] = ()
    format: BatchFormat = "stepfleet"
    batch_id: str
    known: int = 0


@dataclass(slots=True)
class Problems:
    """What is wrong with a batch's lines: the first 20 in words, the others as a number.

    The same again and again, as a field that no row has, is shown three times.
    """

    shown: list[LineProblem] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    rows: "array[int]" = field(default_factory=lambda: array("Q"))

    def add(self, line: RawLine, message: str) -> None:
        """Note that a line is bad."""
        if len(self.shown) < SHOWN and self.seen[message] < SAME_SHOWN:
            self.seen[message] += 1
            named = _FIELD.match(message)
            where = named[1] if named else None
            problem = LineProblem(unit=line.unit, line=line.number, field=where, text=message)
            self.shown.append(problem)
        self.rows.append(line.row)

    def lines(self) -> tuple[str, ...]:
        """Return one sentence per problem, and how many more there are."""
        more = len(self.rows) - len(self.shown)
        shown = tuple(map(str, self.shown))
        return (*shown, f"and {more:,} more") if more else shown


@dataclass(frozen=True, slots=True)
class Checked:
    """What the first reading found. `digest` is the content address of lines and agents."""

    rows: int
    total: int
    digest: str
    problems: Problems
    version: tuple[int, int]
    before: "array[int]" = field(default_factory=lambda: array("Q"))
    """The rows that good lines name in `after`, in their order."""


def check(source: BatchInput, plan: Plan, *, skip_invalid: bool) -> Checked:
    """Read every line once.

    Raises `ConfigurationError` that lists the bad lines, unless `skip_invalid` is true and
    some are good.
    """
    found = examine(source, plan)
    problems = found.problems
    if problems.rows and not (skip_invalid and found.total):
        raise ConfigurationError(_refusal(source, problems, found.rows, hint=not skip_invalid))
    return found


def examine(source: BatchInput, plan: Plan) -> Checked:
    """Read every line once, whatever is wrong with them. Raises `ConfigurationError` for none."""
    version = source.version
    problems = Problems()
    digest = hashlib.sha256()
    rows, before = 0, array("Q")
    with contextlib.closing(_Ids(plan.rules.id_field or "id")) as ids:
        for line in source:
            rows += 1
            digest.update(line.data or b"")
            digest.update(b"\n")
            try:
                draft = draft_of(plan, line)
                named = ids.rows_of(draft)
                ids.add(draft, line)
                before.extend(named)
            except ConfigurationError as error:
                problems.add(line, error.message)
    if not rows:
        raise ConfigurationError(f"{source.name} is empty; write one {source.form}")
    digest.update(plan.signature)
    good = rows - len(problems.rows)
    return Checked(rows, good, digest.hexdigest(), problems, version, before)


def valid_lines(source: BatchInput, plan: Plan, checked: Checked) -> Iterator[tuple[int, Draft]]:
    """Read the valid lines again. Raises `ConfigurationError` when the file has changed since."""
    bad = iter(checked.problems.rows)
    next_bad, place = next(bad, -1), 0
    for line in source:
        if line.row == next_bad:
            next_bad = next(bad, -1)
            continue
        if line.row >= checked.rows:
            break
        draft = draft_of(plan, line)
        if count := len(draft.line.after):
            draft = replace(draft, before=tuple(checked.before[place : place + count]))
            place += count
        yield line.row, draft
    if source.version != checked.version:
        msg = f"{source.name} was changed while it was submitted; submit it again"
        raise ConfigurationError(msg)


def draft_of(plan: Plan, line: RawLine) -> Draft:
    """Return what becomes of a line. Raises `ConfigurationError` with what is wrong with it."""
    if line.data is None:
        raise ConfigurationError(line.problem)
    return plan.draft(line.data)


def _refusal(source: BatchInput, problems: Problems, rows: int, *, hint: bool) -> str:
    count = len(problems.rows)
    start = f"{source.name}: {count:,} of {rows:,} lines cannot be used, so nothing was submitted"
    fix = "\n  (skip_invalid=True submits the others)" if hint and count < rows else ""
    return "\n  ".join((start, *problems.lines())) + fix


class _Ids:
    """The ids seen so far, in a temporary database that spills to disk by itself."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen = sqlite3.connect("", isolation_level=None)
        self._seen.execute("PRAGMA journal_mode = OFF")
        self._seen.execute("PRAGMA synchronous = OFF")
        self._seen.execute(
            "CREATE TABLE ids (id TEXT PRIMARY KEY, line INTEGER, row INTEGER) WITHOUT ROWID"
        )
        self._seen.execute("BEGIN")

    def add(self, draft: Draft, line: RawLine) -> None:
        """Note a line's id. Raises `ConfigurationError` when another line has it."""
        line_id = draft.line.line_id
        if line_id is None:
            return
        row = (line_id, line.number, line.row)
        if self._seen.execute("INSERT OR IGNORE INTO ids VALUES (?, ?, ?)", row).rowcount:
            return
        found = self._seen.execute("SELECT line FROM ids WHERE id = ?", (line_id,)).fetchone()
        name = "custom_id" if draft.line.model else self._name
        msg = (
            f"field {name!r}: {line_id!r} is the id of {line.unit} {found[0]} already; ids are "
            "unique"
        )
        raise ConfigurationError(msg)

    def rows_of(self, draft: Draft) -> list[int]:
        """Return the rows that a line's `after` names: lines wait for lines above them alone.

        Raises `ConfigurationError` for an id that no line above it has.
        """
        found = []
        for one in draft.line.after:
            row = self._seen.execute("SELECT row FROM ids WHERE id = ?", (one,)).fetchone()
            if row is None:
                msg = f"field 'after': no good line above this one has the id {one!r}; lines wait "
                raise ConfigurationError(f"{msg}for lines above them, so that there is no cycle")
            found.append(row[0])
        return found

    def close(self) -> None:
        """Throw the ids away."""
        self._seen.close()
