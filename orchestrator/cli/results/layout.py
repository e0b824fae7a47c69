"""How results are written: lines or a table, which fields, in which order."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepfleet.orchestrator.batches.files.tables import require_arrow, select
from stepfleet.orchestrator.cli.results.places import is_empty
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.batch import BatchFormat

Kind = Literal["full", "slim", "openai", "fields", "csv", "parquet"]
TABLES = {".csv": "csv", ".parquet": "parquet"}
_NO_TABLES = {".tsv", ".xls", ".xlsx", ".feather", ".arrow"}
STDOUT = Path("-")
SLIM_COLUMNS = (
    "id,run_id,status,stop_reason,output,structured.*,error,last_error.message,cost_usd,end_time"
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The form of results: full, slim or OpenAI's lines; lines of `fields`; a table of `fields`."""

    kind: Kind
    fields: str | None = None

    @property
    def grows(self) -> bool:
        """Whether lines are appended as runs end: they name their run and its end.

        A file of any other form is written as a whole when the batch has ended.
        """
        return self.kind in {"full", "slim", "openai"}

    @property
    def is_table(self) -> bool:
        """Whether all rows have the same columns, known only when all of them are."""
        return self.kind in {"csv", "parquet"}


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """The options `--out`, `--format`, `--fields`, `--slim` and `--ordered` as they are given."""

    out: Path | None = None
    output_format: str = "auto"
    fields: str | None = None
    slim: bool = False
    ordered: bool = False

    @property
    def form(self) -> dict[str, Any]:
        """The options that are given, without the file."""
        unset = ResultOptions()
        names = ("output_format", "fields", "slim", "ordered")
        return {one: given for one in names if (given := getattr(self, one)) != getattr(unset, one)}

    @property
    def words(self) -> list[str]:
        """The options that are given, without the file, as words of a command."""
        found = []
        for name, value in self.form.items():
            found.append(f"--{name.removeprefix('output_')}")
            if value is not True:
                found.append(value)
        return found

    def check_new(self) -> None:
        """Raise `ConfigurationError` where a file to be written as a whole holds something."""
        named = self.out is not None and self.out.suffix.lower() in TABLES
        is_whole = named or self.output_format in TABLES.values() or self.fields is not None
        if is_whole and self.out is not None and not is_empty(self.out):
            msg = (
                f"--out {self.out} holds something already; name another file, or replace it when "
                f"the batch has ended: stepfleet results ID --out {self.out}"
            )
            raise ConfigurationError(msg)

    def check(self) -> None:
        """Raise `ConfigurationError`, with the fix, where options contradict, or pyarrow lacks."""
        suffix = self.out.suffix.lower() if self.out else ""
        named, given = TABLES.get(suffix), self.output_format
        if self.out == STDOUT:
            msg = (
                "--out -: a batch that runs writes its results into a file; name one, or print "
                "them when it has ended: stepfleet results ID"
            )
            raise ConfigurationError(msg)
        if self.fields is not None and self.slim:
            raise ConfigurationError("--slim and --fields: leave one out; --fields lists its own")
        if given == "openai" and (self.fields is not None or self.slim):
            msg = "--format openai has fixed fields: leave out --fields and --slim, or the format"
            raise ConfigurationError(msg)
        if suffix in _NO_TABLES:
            msg = f"--out {self.out}: tables are written as .csv or .parquet; name such a file"
            raise ConfigurationError(msg)
        if named and given not in {"auto", named}:
            msg = f"--out {self.out} is named as {named}, --format says {given}; leave one out"
            raise ConfigurationError(msg)
        if "parquet" in {named, given}:
            require_arrow()
            if self.out is None:
                raise ConfigurationError("--format parquet is binary: name a file with --out")
        select(self.fields)

    def layout(self, batch: BatchFormat) -> Layout:
        """Return the form for results of a batch whose input has the format `batch`."""
        suffix = self.out.suffix.lower() if self.out else ""
        kind = TABLES.get(suffix, self.output_format)
        if kind in {"csv", "parquet"}:
            names = SLIM_COLUMNS if self.slim else self.fields
            return Layout("csv" if kind == "csv" else "parquet", names)
        if self.fields is not None:
            return Layout("fields", self.fields)
        if self.slim:
            return Layout("slim")
        by_batch = batch == "openai" and kind in {"auto", "jsonl"}
        return Layout("openai" if kind == "openai" or by_batch else "full")
