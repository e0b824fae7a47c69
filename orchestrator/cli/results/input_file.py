"""Facts of a batch file, read before anything is submitted.

Does not check lines: the submission reports bad ones with their numbers.
"""

import contextlib
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.batches.files.lines import format_of, read_object
from stepfleet.orchestrator.batches.files.openai_format import plain_config
from stepfleet.orchestrator.batches.files.source import BatchInput, InputFormat, open_input
from stepfleet.orchestrator.client.inputs import BatchOptions, Priority
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.limits.limit import BATCH, own_limit
from stepfleet.orchestrator.records import exact_json


@dataclass(frozen=True, slots=True)
class InputForm:
    """What options say of an input file's form; `for_batch` has them for `submit_batch`."""

    input_format: InputFormat | None = None
    input_field: str | None = None
    id_field: str | None = None
    only_new: bool = False
    tenant: str | None = None
    priority: str | None = None
    limit: Sequence[str] | None = None
    after: Sequence[str] | None = None

    def open(self, file: Path) -> BatchInput:
        """Open the file."""
        return open_input(file, self.input_format)

    def for_batch(self) -> BatchOptions:
        """Return the options of `submit_batch`."""
        return BatchOptions(
            input_format=self.input_format,
            input_field=self.input_field,
            id_field=self.id_field,
            only_new=self.only_new,
            tenant=self.tenant,
            priority=cast("Priority | None", self.priority),
            limit=own_limit(BATCH, self.limit),
            after=self.after or None,
        )


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


def digest_of(source: BatchInput, form: InputForm = InputForm()) -> bytes:
    """Return the content address of the lines and of the fields that they are read by."""
    digest = hashlib.sha256()
    for line in source:
        digest.update((line.data or b"") + b"\n")
    if named := [form.input_field, form.id_field] if form.input_field or form.id_field else []:
        digest.update(exact_json.dumps(named))
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
