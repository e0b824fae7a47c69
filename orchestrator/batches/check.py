"""Looks at every line of a batch before any becomes a run: what becomes of it, or what is wrong.

All problems are found in one reading, in constant memory; ids that occur twice too. Knows no Redis.
"""

import contextlib
import hashlib
import re
import sqlite3
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import orjson

from stepfleet.orchestrator.agents.config import AgentConfig, merged_overrides, stored_overrides
from stepfleet.orchestrator.batches.files.lines import (
    METADATA_LIMIT,
    BatchLine,
    LineFormat,
    RowRules,
    check_size,
    read_object,
)
from stepfleet.orchestrator.batches.files.openai_format import (
    RawLine,
    parse_openai_line,
    plain_config,
)
from stepfleet.orchestrator.batches.files.source import BatchInput
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.support import check_messages
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.batch import BatchFormat
from stepfleet.orchestrator.store.runs.submission import Submission

REMEMBERED = 1000
SHOWN = 20
SAME_SHOWN = 3
_IDS = "CREATE TABLE ids (id TEXT PRIMARY KEY, line INTEGER, row INTEGER) WITHOUT ROWID"
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
class Draft:
    """A line that is valid: what its run starts with. `before`: the rows of its `after`."""

    line: BatchLine
    config: AgentConfig
    digest: str
    overrides: dict[str, Any]
    max_steps: int
    before: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Base:
    """An agent with the overrides that hold for the whole batch."""

    config: AgentConfig
    digest: str
    overrides: dict[str, Any]
    changed: AgentConfig


class Plan:
    """Turns the lines of a submission into drafts. Does no I/O of its own.

    Agents that it does not bring are looked up by `named`, which raises `ConfigurationError` for
    those it does not know. The overrides hold for every line; a line's own win.
    """

    def __init__(
        self,
        submission: Submission,
        named: Callable[[str], AgentConfig],
        *,
        is_table: bool = False,
    ) -> None:
        self.format: LineFormat | None = None
        self.submission = submission
        self.rules = RowRules(submission.input_field, submission.id_field, is_table)
        self._given = given = submission.agents
        self._default = submission.agent or (next(iter(given)) if len(given) == 1 else None)
        self._named = named
        self._bases: dict[str, _Base | ConfigurationError] = {}
        self._plains: dict[bytes, _Base] = {}
        self._known: dict[tuple[str, bytes], tuple[dict[str, Any], int]] = {}
        if self._default is not None:
            self._base(self._default)

    @property
    def configs(self) -> list[AgentConfig]:
        """The configurations that lines have used so far."""
        return [base.config for base in self._used]

    @property
    def agents(self) -> list[str]:
        """Their names, sorted."""
        return sorted({config.name for config in self.configs})

    @property
    def signature(self) -> bytes:
        """What besides the lines decides what their runs do."""
        parts = sorted(([base.digest, base.overrides] for base in self._used), key=itemgetter(0))
        whole: list[Any] = [self._default, parts]
        if self.rules.names_fields:
            whole += [self.rules.input_field, self.rules.id_field]
        if self.submission.tenant:
            whole.append(f"tenant {self.submission.tenant}")
        if self.submission.after:
            whole += [f"after {one}" for one in self.submission.after.ids]
        return exact_json.dumps(whole, option=orjson.OPT_SORT_KEYS)

    @property
    def _used(self) -> list[_Base]:
        found = [base for base in self._bases.values() if isinstance(base, _Base)]
        return [*found, *self._plains.values()]

    def draft(self, raw: bytes) -> Draft:
        """Return what becomes of a line. Raises `ConfigurationError` that names field and fix."""
        data = read_object(raw)
        kind = self.rules.format_of(data)
        if self.format is None:
            self.format = kind
        if kind != self.format:
            msg = f"has the format {kind}, and earlier lines {self.format}; use one per file"
            raise ConfigurationError(msg)
        if kind == "openai":
            line = parse_openai_line(data)
            base = self._base_of(line)
        else:
            base = self._base(self._name_of(self.rules.agent_of(data)))
            line = self.rules.line_of(data, base.config.prompt)
        if self.submission.tenant and line.tenant is None:
            line = replace(line, tenant=self.submission.tenant)
        overrides, max_steps = self._decide(base, line.overrides)
        name = "input" if kind == "stepfleet" else "body.messages"
        check_messages(_models(base.config, overrides), line.messages, name)
        return Draft(line, base.config, base.digest, overrides, max_steps)

    def _base_of(self, line: BatchLine) -> _Base:
        if self._default is None and line.model is not None:
            return self._plain(line, line.model)
        base = self._base(self._name_of(None))
        _check_request(line, base.config)
        return base

    def _name_of(self, named: str | None) -> str:
        if (name := named or self._default) is not None:
            return name
        known = ", ".join(sorted(self._given))
        choice = f"one of {known}" if known else "an agent"
        msg = (
            f"field 'agent' is missing; name {choice} there, or for the whole batch with agent=..."
        )
        raise ConfigurationError(msg)

    def _base(self, name: str) -> _Base:
        if name not in self._bases:
            try:
                config = self._given.get(name) or self._named(name)
                self._bases[name] = self._made(config)
            except ConfigurationError as error:
                if name == self._default:
                    raise
                self._bases[name] = error
        base = self._bases[name]
        if isinstance(base, ConfigurationError):
            raise ConfigurationError(base.message)
        return base

    def _plain(self, line: BatchLine, model: str) -> _Base:
        """Return the agent of a request line: one per model and further fields of the body."""
        key = exact_json.dumps([model, line.extra_body], option=orjson.OPT_SORT_KEYS)
        if key not in self._plains:
            if len(self._plains) >= REMEMBERED:
                msg = (
                    f"is the {REMEMBERED + 1:,}th with other fields in 'body' (not messages and "
                    "sampling); leave out those that differ by line, like 'user', or split the file"
                )
                raise ConfigurationError(msg)
            config = plain_config(model, line.extra_body)
            check_size(len(key), METADATA_LIMIT, "body")
            if line.tools:
                msg = (
                    "field 'body.tools': tools run here as an agent's code; submit with an agent "
                    "that has them (agent=...), or leave them out"
                )
                raise ConfigurationError(msg)
            self._plains[key] = self._made(config)
        return self._plains[key]

    def _made(self, config: AgentConfig) -> _Base:
        overrides = stored_overrides(config, self.submission.overrides)
        return _Base(config, config.digest, overrides, config.with_overrides(overrides))

    def _decide(self, base: _Base, wanted: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Return the run's overrides in stored form and its step limit."""
        if not wanted:
            return base.overrides, base.changed.max_steps
        key = (base.digest, exact_json.dumps(wanted, option=orjson.OPT_SORT_KEYS))
        if key not in self._known:
            own = stored_overrides(base.changed, wanted)
            changed = base.changed.with_overrides(own)
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[key] = (merged_overrides(base.overrides, own), changed.max_steps)
        return self._known[key]


def _models(config: AgentConfig, overrides: Mapping[str, Any]) -> tuple[str, ...]:
    if "model" not in overrides:
        return config.models
    return (overrides["model"], *overrides.get("fallbacks", ()))


def _check_request(line: BatchLine, config: AgentConfig) -> None:
    """Raise `ConfigurationError` where an agent cannot serve an OpenAI line."""
    names = [tool.name for tool in config.tools]
    missing = [name for name in line.tools if name not in names]
    if missing and not config.mcp_servers:
        msg = (
            f"field 'body.tools': agent {config.name!r} has no tool {missing[0]!r}; "
            "give it that tool, or leave it out of the line"
        )
        raise ConfigurationError(msg)
    if line.extra_body:
        name = next(iter(line.extra_body))
        msg = (
            f"field 'body.{name}' cannot be set per line for agent {config.name!r}; put it into "
            "the agent's settings.extra_body, or leave it out"
        )
        raise ConfigurationError(msg)


@dataclass(frozen=True, slots=True)
class Checked:
    """What the first reading found. `digest` is the content address of lines and agents."""

    source: BatchInput
    plan: Plan
    rows: int
    total: int
    digest: str
    problems: Problems
    version: tuple[int, int]
    before: "array[int]" = field(default_factory=lambda: array("Q"))
    """The rows that good lines name in `after`, in their order."""


def check(source: BatchInput, plan: Plan) -> Checked:
    """Read every line once.

    Raises `ConfigurationError` that lists the bad lines, unless they may be left out and some are
    good.
    """
    found, skips = examine(source, plan), plan.submission.skip_invalid
    problems = found.problems
    if problems.rows and not (skips and found.total):
        raise ConfigurationError(_refusal(source, problems, found.rows, hint=not skips))
    return found


def examine(source: BatchInput, plan: Plan) -> Checked:
    """Read every line once, whatever is wrong with them. Raises `ConfigurationError` for none."""
    version = source.version
    problems = Problems()
    digest = hashlib.sha256()
    rows, before = 0, array("Q")
    with contextlib.closing(spilled(_IDS)) as seen:
        ids = _Ids(plan.rules.id_field or "id", seen)
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
    return Checked(source, plan, rows, good, digest.hexdigest(), problems, version, before)


def valid_lines(checked: Checked) -> Iterator[tuple[int, Draft]]:
    """Read the valid lines again. Raises `ConfigurationError` when the file has changed since."""
    source = checked.source
    bad = iter(checked.problems.rows)
    next_bad, place = next(bad, -1), 0
    for line in source:
        if line.row == next_bad:
            next_bad = next(bad, -1)
            continue
        if line.row >= checked.rows:
            break
        draft = draft_of(checked.plan, line)
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


def spilled(table: str) -> sqlite3.Connection:
    """Return a temporary database with that table: it spills to disk by itself.

    It may be used in several threads, one after the other.
    """
    made = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    for one in ("PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF", table, "BEGIN"):
        made.execute(one)
    return made


class _Ids:
    """The ids seen so far."""

    def __init__(self, name: str, seen: sqlite3.Connection) -> None:
        self._name = name
        self._seen = seen

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
