"""Options that several commands share, declared once, and exit codes."""

import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

COMPLETED, SOME_FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes of the commands."""
DATA_FOLDER = Path(".stepfleet")
_data = ContextVar("data", default=DATA_FOLDER)
called_as = ContextVar("called_as", default="stepfleet")
"""The command that runs, as `stepfleet limits set`: the audit names it."""
FLOWER_PORT = "STEPFLEET_FLOWER_PORT"
DEFAULT_FLOWER_PORT = 5555


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


STANDS_FOR = "stands_for"
"""In the globals of a function that has only a command's options: the module of the command."""


def with_records(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command whose options are those of `command`, and the fields of its records."""

    @wraps(command)
    def call(**given: Any) -> Any:
        if module := command.__globals__.get(STANDS_FOR):
            found = getattr(import_module(module), command.__name__)
            return _called(inspect.unwrap(found), given)
        return _called(command, given)

    call.__signature__ = inspect.Signature(_parameters(command))  # type: ignore[attr-defined]
    return call


def _own(maker: Callable[..., Any]) -> Iterator[tuple[inspect.Parameter, Any]]:
    """Yield the parameters, each with its record where it is one."""
    for one in inspect.signature(maker, eval_str=True).parameters.values():
        yield one, one.annotation if hasattr(one.annotation, "__dataclass_fields__") else None


def _parameters(maker: Callable[..., Any]) -> list[inspect.Parameter]:
    found = []
    for one, record in _own(maker):
        own = one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        found += _parameters(record) if record else [own]
    return found


def _called(maker: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    return maker(
        **{
            one.name: _called(record, given) if record else given[one.name]
            for one, record in _own(maker)
        }
    )


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
Slots = Annotated[
    int | None,
    typer.Option(
        "--slots", min=1, max=100_000, help="Steps at once in each worker (1,000 by default)."
    ),
]
Workers = Annotated[int, typer.Option("--workers", "-w", min=1, max=256, help="Worker processes.")]
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
BasicAuth = Annotated[
    str | None,
    typer.Option(
        "--basic-auth",
        envvar="STEPFLEET_FLOWER_BASIC_AUTH",
        metavar="USER:PASSWORD",
        help="Require this user and password. Prefer the variable: ps shows arguments.",
    ),
]


INPUTS = "Inputs: JSONL, CSV, TSV, Parquet or a JSON array."
