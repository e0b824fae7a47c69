"""Facts of a batch file, read before anything is submitted.

Does not check lines: the submission reports bad ones with their numbers.
"""

import contextlib
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.batches.lines import format_of, read_object
from stepfleet.orchestrator.batches.openai_format import plain_config
from stepfleet.orchestrator.batches.source import BatchInput
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.batch import BatchFormat


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


def digest_of(source: BatchInput) -> bytes:
    """Return the content address of the lines."""
    digest = hashlib.sha256()
    for line in source:
        digest.update((line.data or b"") + b"\n")
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
        if isinstance(name, str) and name in agents:
            found.setdefault(name, agents[name].config)
        elif name is None and format_of(data) == "openai":
            plain = plain_config()
            found.setdefault(plain.name, plain)
    return list(found.values())


def kind_of(wanted: str, batch: BatchFormat) -> BatchFormat:
    """Return the format of results: `wanted`, or for `auto` the batch's own. Pure."""
    if wanted == "openai":
        return "openai"
    return "stepfleet" if wanted == "stepfleet" else batch
