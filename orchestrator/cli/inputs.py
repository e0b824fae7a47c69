"""What a command is given: files of inputs, texts, changes of limits, times, confirmations."""

import contextlib
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.config import AgentConfig, named_overrides
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.batches.files.lines import INPUT_LIMIT, format_of, read_object
from stepfleet.orchestrator.batches.files.openai_format import plain_config
from stepfleet.orchestrator.batches.files.source import BatchInput
from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.text.validation import duration


@dataclass(frozen=True, slots=True)
class LineOptions:
    """How lines are read, and what holds for all their runs: options of `submit_batch`."""

    input_format: Annotated[
        Literal["jsonl", "json", "csv", "tsv", "parquet"] | None,
        typer.Option(
            "--input-format", help="Format of FILE; without it, the one its ending names."
        ),
    ] = None
    input_field: Annotated[
        str | None,
        typer.Option(
            "--input-field",
            metavar="NAME",
            help="The field to send, for an agent without a prompt.",
        ),
    ] = None
    id_field: Annotated[
        str | None, typer.Option("--id-field", metavar="NAME", help="The field that is a row's id.")
    ] = None
    tenant: options.Tenant = None
    priority: options.BatchPriority = None
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="FIELD=VALUE",
            help="For the batch alone: in_flight=20, starts_per_minute=300, ...; again for more.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class FileOptions(LineOptions):
    """The same for a file that is submitted once."""

    skip_invalid: Annotated[
        bool,
        typer.Option("--skip-invalid", help="Leave out bad lines instead of refusing the file."),
    ] = False
    only_new: Annotated[
        bool,
        typer.Option("--only-new", help="Add the rows that the batch of this file lacks to it."),
    ] = False


@contextlib.contextmanager
def named_file(path: Path) -> Iterator[Path]:
    """Give the path itself, or for `-` the path of a copy of standard input: it is read twice."""
    if str(path) != "-":
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="stepfleet-", suffix=".jsonl") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        yield Path(copy.name)


def digest_of(source: BatchInput, form: LineOptions = LineOptions()) -> bytes:
    """Return the content address of the lines and of the fields that they are read by."""
    digest = hashlib.sha256()
    for line in source:
        digest.update((line.data or b"") + b"\n")
    if any(fields := [form.input_field, form.id_field]):
        digest.update(exact_json.dumps(fields))
    if form.tenant:
        digest.update(f"tenant {form.tenant}".encode())
    return digest.digest()


def default_agent(agents: Mapping[str, Agent], named: str | None) -> str | None:
    """Return the agent of lines that name none: `named`, or the only one.

    Raises `ConfigurationError` where `named` does not exist. Pure.
    """
    if named is not None and named not in agents:
        msg = f"--agent {named}: no such agent; --agents has {', '.join(sorted(agents))}"
        raise ConfigurationError(msg)
    if named is None and len(agents) == 1:
        return next(iter(agents))
    return named


def agents_of(reference: str | None, named: str | None) -> tuple[dict[str, Agent], str | None]:
    """Return the agents of `--agents`, if any, and the name of that of lines that name none."""
    known = load_agents(reference) if reference else {}
    return known, default_agent(known, named) if known else named


def agent_of(reference: str | None, named: str | None) -> Agent | str:
    """Return the agent of `--agents` and `--agent`. Raises `ConfigurationError` for none."""
    known, name = agents_of(reference, named)
    if name is None:
        raise ConfigurationError("name the agent: --agent NAME, or --agents MODULE with just one")
    return known.get(name, name)


def configs_used(
    source: Iterable[bytes | None], agents: Mapping[str, Agent], default: str | None
) -> list[AgentConfig]:
    """Return the configurations that the lines will run with, once each; bad lines have none."""
    found: dict[str, AgentConfig] = {}
    for raw in source:
        try:
            data = read_object(raw or b"")
        except ConfigurationError:
            continue
        name = data.get("agent") or default
        if not (isinstance(name, str) and name in agents):
            name = default  # it is a field of a row, or unknown
        if name is not None and name in agents:
            found.setdefault(name, agents[name].config)
        elif name is None and format_of(data) == "openai":
            plain = plain_config()
            found.setdefault(plain.name, plain)
    return list(found.values())


def overrides_of(raised: Sequence[str] | None, option: str = "--raise") -> dict[str, Any]:
    """Return `max_steps=20` and the like as overrides; a value is JSON where it can be read so.

    `option` is the option that they were given by. Raises `ConfigurationError` for one without
    a name and a value. Pure.
    """
    overrides: dict[str, Any] = {}
    for one in raised or ():
        name, equals, value = one.partition("=")
        if not equals or not name.strip() or not value.strip():
            msg = f"{option} {one}: write FIELD=VALUE, as in {option} max_steps=20"
            raise ConfigurationError(msg)
        try:
            overrides[name.strip()] = exact_json.loads(value)
        except ValueError:
            overrides[name.strip()] = value.strip()
    return named_overrides(overrides)


def standard_input() -> str:
    """Return the text on standard input. Raises `ConfigurationError` where it is not UTF-8."""
    # One byte above the limit is enough for a refusal.
    raw = sys.stdin.buffer.read(INPUT_LIMIT + 1)
    try:
        return raw.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        if len(raw) > INPUT_LIMIT:
            return raw.decode(errors="replace")
        msg = f"standard input is not UTF-8 (byte {error.start + 1}); convert it, as with iconv"
        raise ConfigurationError(msg) from None


def seconds_of(text: str, option: str) -> int:
    """Return a time in seconds: `90`, `90s`, `15m`, `12h`, `2d`, `1w`.

    Raises `ConfigurationError` for anything else.
    """
    found = duration(text)
    if found is None:
        raise ConfigurationError(f"{option} is {text!r}; write a time like 90s, 12h or 2d")
    return found


def confirm(question: str, otherwise: str, nothing: str) -> None:
    """Ask on the terminal. Raises `ConfigurationError` for no terminal or any answer but yes.

    `otherwise` is the way without a terminal, `nothing` what then was not done.
    """
    if not sys.stdin.isatty():
        raise ConfigurationError(f"no terminal to confirm on: {otherwise}")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise ConfigurationError(f"nothing was {nothing}")
