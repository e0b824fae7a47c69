"""Checkpoints as files: written whole or not at all, bounded in size and number."""

import os
import re
import tempfile
from pathlib import Path

from stepfleet.orchestrator.client.checkpoints.record import AgentCheckpoint
from stepfleet.orchestrator.errors import ConfigurationError, SerializationError

LARGEST = 256 * 1024 * 1024
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")
"""Run ids that are part of a file's name as they are: no folder, no pattern, nothing hidden."""
_STEPS = r"-\d{6,}\.json"


def save_checkpoint(checkpoint: AgentCheckpoint, path: str | Path) -> Path:
    """Write a checkpoint to a JSON file, readable by its owner only; return the file's path.

    A file that was there is replaced as a whole. Raises `SerializationError` above 256 MiB and
    `ConfigurationError` where the file cannot be written.
    """
    data = checkpoint.to_json().encode()
    target = Path(path)
    if len(data) > LARGEST:
        msg = f"the checkpoint of run {checkpoint.run_id} has {len(data):,} bytes; {LARGEST:,} fit"
        raise SerializationError(msg)
    try:
        _replace(target, data)
    except OSError as error:
        msg = f"the checkpoint cannot be written to {target}: {error.strerror}; name another file"
        raise ConfigurationError(msg) from None
    return target


def load_checkpoint(path: str | Path) -> AgentCheckpoint:
    """Read a checkpoint from a file.

    Raises `ConfigurationError` where the file cannot be read, `SerializationError` where it
    holds no checkpoint that this version knows.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        msg = (
            f"the checkpoint {path} cannot be read: {error.strerror}; name the file that was saved"
        )
        raise ConfigurationError(msg) from None
    if len(data) > LARGEST:
        raise SerializationError(
            f"{path} is larger than {LARGEST:,} bytes, the limit of checkpoints"
        )
    return AgentCheckpoint.from_json(data)


class CheckpointFolder:
    """A folder that keeps the newest `keep` checkpoints of each run."""

    def __init__(self, path: str | Path, *, keep: int = 5) -> None:
        if keep < 1:
            raise ConfigurationError(f"field 'keep' is {keep}; keep 1 checkpoint or more")
        self.path = Path(path)
        self.keep = keep

    def save(self, checkpoint: AgentCheckpoint) -> Path:
        """Write a checkpoint beside the others, and remove the run's oldest above the limit.

        Raises `ConfigurationError` as `save_checkpoint` does, and for a run id that is no part of
        a file's name: the writer of a checkpoint's file chooses the id in it.
        """
        name = f"{_checked(checkpoint.run_id)}-{len(checkpoint.steps):06d}.json"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            msg = f"the folder {self.path} cannot be made: {error.strerror}; name another one"
            raise ConfigurationError(msg) from None
        saved = save_checkpoint(checkpoint, self.path / name)
        for old in self.files(checkpoint.run_id)[: -self.keep]:
            old.unlink(missing_ok=True)
        return saved

    def files(self, run_id: str) -> list[Path]:
        """Return the files of a run's checkpoints, the oldest first.

        Raises `ConfigurationError` for a run id that is no part of a file's name.
        """
        name = re.compile(re.escape(_checked(run_id)) + _STEPS)
        if not self.path.is_dir():
            return []
        found = [path for path in self.path.iterdir() if name.fullmatch(path.name)]
        return sorted(found, key=lambda path: (len(path.name), path.name))

    def newest(self, run_id: str) -> AgentCheckpoint:
        """Return a run's newest checkpoint. Raises `ConfigurationError` if there is none."""
        files = self.files(run_id)
        if not files:
            msg = f"{self.path} has no checkpoint of run {run_id}; look for its folder"
            raise ConfigurationError(msg)
        return load_checkpoint(files[-1])


def _checked(run_id: str) -> str:
    if not _PLAIN.fullmatch(run_id):
        msg = (
            f"field 'run_id' is {run_id[:100]!r}, which is no part of a file's name; save this "
            "checkpoint with save_checkpoint, to a file that you name"
        )
        raise ConfigurationError(msg)
    return run_id


def _replace(target: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
