"""Notes by which the same `run` command finds its batch again: idempotency key and batch id."""

import hashlib
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import orjson

from stepfleet.orchestrator.agents.agent import Agent


@dataclass(frozen=True, slots=True)
class Note:
    """A command's batch; `batch_id` is empty until it is submitted."""

    key: str
    batch_id: str = ""


def identity(
    source: bytes, agent: str | None, agents: Mapping[str, Agent], out: Path | None
) -> str:
    """Return the identity of a `run` command: a digest of file content, agents, results file."""
    digest = hashlib.sha256(source)
    for part in (agent or "", str(out.absolute()) if out else ""):
        digest.update(b"\0" + part.encode())
    for name in sorted(agents):
        digest.update(b"\0" + agents[name].config.digest.encode())
    return digest.hexdigest()[:32]


class Notes:
    """The notes of one data folder."""

    def __init__(self, folder: Path, identity: str) -> None:
        self._path = folder / f"{identity}.json"
        self._identity = identity

    def read(self) -> Note | None:
        """Return the note of the last such command, if any."""
        try:
            return Note(**orjson.loads(self._path.read_bytes()))
        except (OSError, orjson.JSONDecodeError, TypeError):
            return None

    def begin(self) -> Note:
        """Note a new batch before its submission, so that a partial submission is found again."""
        note = Note(key=f"run-{self._identity}-{uuid.uuid4().hex[:8]}")
        self._write(note)
        return note

    def submitted(self, note: Note, batch_id: str) -> None:
        """Note the batch's id."""
        self._write(replace(note, batch_id=batch_id))

    def _write(self, note: Note) -> None:
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(orjson.dumps(asdict(note)))
        fresh.replace(self._path)
