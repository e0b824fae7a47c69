"""Options that several commands share, declared once, and exit codes."""

import shlex
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Literal

import typer

COMPLETED, SOME_FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes of the commands."""
DATA_FOLDER = Path(".stepfleet")
_data = ContextVar("data", default=DATA_FOLDER)
FLOWER_PORT = "STEPFLEET_FLOWER_PORT"
DEFAULT_FLOWER_PORT = 5555
Format = Literal["auto", "jsonl", "csv", "parquet", "stepfleet", "openai"]


def of_data_folder(data: Path) -> Path:
    """Return a command's `--data` as it is; the commands that it prints name the same folder."""
    _data.set(data)
    return data


def data_option() -> str:
    """Return the option by which a further command finds this one's data folder.

    With a space before; empty for the folder's default.
    """
    data = _data.get()
    return "" if data == DATA_FOLDER else f" --data {shlex.quote(str(data))}"


AgentsRef = Annotated[
    str,
    typer.Option(
        "--agents",
        "-A",
        envvar="STEPFLEET_AGENTS",
        help="The agents: package.module, file.py or file.toml; several with commas.",
    ),
]
MaybeAgentsRef = Annotated[
    str | None,
    typer.Option(
        "--agents",
        "-A",
        envvar="STEPFLEET_AGENTS",
        help="The agents' module or file; without it, those that workers announced.",
    ),
]
AgentName = Annotated[
    str | None, typer.Option("--agent", help="The agent for lines that name none.")
]
Data = Annotated[
    Path,
    typer.Option(
        "--data",
        envvar="STEPFLEET_DATA",
        callback=of_data_folder,
        help="Folder of the private Redis, logs and resume notes.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Results file: .csv, .parquet, or else JSON lines."),
]
Slots = Annotated[
    int | None,
    typer.Option(
        "--slots", min=1, max=100_000, help="Steps at once in each worker (1,000 by default)."
    ),
]
Workers = Annotated[int, typer.Option("--workers", "-w", min=1, max=256, help="Worker processes.")]
SkipInvalid = Annotated[
    bool, typer.Option("--skip-invalid", help="Leave out bad lines instead of refusing the file.")
]
InputKind = Annotated[
    Literal["jsonl", "json", "csv", "tsv", "parquet"] | None,
    typer.Option("--input-format", help="Format of FILE; without it, the one its ending names."),
]
InputField = Annotated[
    str | None,
    typer.Option(
        "--input-field", metavar="NAME", help="The field to send, for an agent without a prompt."
    ),
]
IdField = Annotated[
    str | None, typer.Option("--id-field", metavar="NAME", help="The field that is a row's id.")
]
Tenant = Annotated[
    str | None,
    typer.Option("--tenant", metavar="NAME", help="Whom the runs are for, in costs and limits."),
]


def _priority(given: str | None) -> str | None:
    """Return the priority; one that there is not is named without the words of a validator."""
    if given not in (None, "high", "normal", "low"):
        raise typer.BadParameter(f"{given!r} is not one of 'high', 'normal', 'low'.")
    return given


BatchPriority = Annotated[
    str | None,
    typer.Option(
        "--priority",
        metavar="[high|normal|low]",
        callback=_priority,
        help="Who goes first where runs wait for limits.",
    ),
]
BatchLimit = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="FIELD=VALUE",
        help="For the batch alone: in_flight=20, starts_per_minute=300, ...; again for more.",
    ),
]
OnlyNew = Annotated[
    bool,
    typer.Option("--only-new", help="Add the rows that the batch of this file lacks to it."),
]
OutFormat = Annotated[
    Format,
    typer.Option(
        "--format", help="Format of results; auto goes by the file's name, lines by the input."
    ),
]
Fields = Annotated[
    str | None,
    typer.Option("--fields", metavar="NAMES", help="These fields: id,structured.*,cost_usd."),
]
Slim = Annotated[
    bool, typer.Option("--slim", help="Short lines: the answer, stop reason, error and cost.")
]
Ordered = Annotated[bool, typer.Option("--ordered", help="Results in the order of the input.")]
NoCheck = Annotated[
    bool,
    typer.Option(
        "--no-check",
        envvar="STEPFLEET_NO_CHECK",
        help="Submit without a test call (one token) to each model.",
    ),
]
BatchId = Annotated[str, typer.Argument(metavar="ID", help="A batch id.")]
_RUN = "A run id, or a line's id in --batch or a new batch."
RunOrLine = Annotated[str, typer.Argument(metavar="RUN", help=_RUN)]
MaybeRunOrLine = Annotated[str | None, typer.Argument(metavar="[RUN]", help=_RUN)]
BatchOfLine = Annotated[
    str | None, typer.Option("--batch", "-b", help="The batch in which RUN is a line's id.")
]
OfBatch = Annotated[
    str | None,
    typer.Option("--batch", "-b", help="All runs of this batch; with RUN the batch of that line."),
]
Raised = Annotated[
    list[str] | None,
    typer.Option("--raise", metavar="FIELD=VALUE", help="Change a limit: max_steps=20."),
]
Again = Annotated[
    bool, typer.Option("--again", help="Begin a new batch of a file that already has one.")
]
Simulate = Annotated[
    str | None,
    typer.Option(
        "--simulate",
        metavar="RULES",
        help="Answer model calls by rules (file.py:name): no provider, key or network.",
    ),
]
SimulateLatency = Annotated[
    str | None,
    typer.Option(
        "--simulate-latency",
        metavar="SECONDS",
        help="Latency of simulated answers: 0.05, 0.2-1.5 (evenly), 1.0~0.5 (log-normal).",
    ),
]
SimulateFaults = Annotated[
    float | None,
    typer.Option(
        "--simulate-faults",
        metavar="SHARE",
        min=0,
        max=1,
        help="Share of simulated calls that fail and are retried, such as 0.05.",
    ),
]
BasicAuth = Annotated[
    str | None,
    typer.Option(
        "--basic-auth",
        envvar="STEPFLEET_FLOWER_BASIC_AUTH",
        metavar="USER:PASSWORD",
        help="Require this user and password. Prefer the variable: ps shows arguments.",
    ),
]
RunWorkers = Annotated[
    int,
    typer.Option(
        "--workers", "-w", min=0, max=256, help="Worker processes; 0 if others do the work."
    ),
]
RetryFailed = Annotated[
    bool,
    typer.Option("--retry-failed", help="Retry the batch's runs that did not complete."),
]
GoOnWith = Annotated[
    str | None,
    typer.Option("--batch", "-b", metavar="ID", help="Resume this batch; no FILE."),
]


INPUTS = "Inputs: JSONL, CSV, TSV, Parquet or a JSON array."
