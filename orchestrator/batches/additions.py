"""Which rows of a file its batch lacks: by their ids, or, where runs have none, by their inputs.

Reads runs, creates none. What is known lies in a temporary database that spills to disk by itself.
"""

import hashlib
import sqlite3
from collections.abc import Iterable
from typing import Self

from stepfleet.orchestrator.batches.plan import Draft
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.batch import Manifest, is_stalled
from stepfleet.orchestrator.store.batches.batches import Batches, run_id_of
from stepfleet.orchestrator.store.codec import MESSAGES

READ_AT_ONCE = 50
"""Inputs in memory: each may have 1 MiB."""
_ANEW = "run the file without --only-new (only_new=True) for a batch of all its rows, paid again"


class KnownRows:
    """The rows that a batch has. `runs` counts them, `with_ids` those that have an id."""

    def __init__(self) -> None:
        self.runs = self.with_ids = 0
        # Filled and read in threads, one after the other.
        self._keys = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._keys.execute("PRAGMA journal_mode = OFF")
        self._keys.execute("CREATE TABLE known (key TEXT PRIMARY KEY) WITHOUT ROWID")
        self._keys.execute("BEGIN")

    def add(self, rows: Iterable[tuple[str, str | None]]) -> None:
        """Note runs by line id and, where that is empty, stored input."""
        for line_id, given in rows:
            if not line_id and given is None:
                msg = "runs of this file have no ids, and memory.trim_log has removed their inputs"
                raise ConfigurationError(f"{msg}: {_ANEW}")
            self.runs += 1
            self.with_ids += bool(line_id)
            key = _by_id(line_id) if line_id else _by_input((given or "").encode())
            self._keys.execute("INSERT OR IGNORE INTO known VALUES (?)", (key,))

    def lacks(self, draft: Draft) -> bool:
        """Return whether no run is this row's: none has its id, or, without an id, its input."""
        keys = [] if draft.line.line_id is None else [_by_id(draft.line.line_id)]
        if self.with_ids < self.runs:
            given = MESSAGES.dump_json(draft.line.messages, exclude_defaults=True)
            keys.append(_by_input(given))
        query = f"SELECT 1 FROM known WHERE key IN ({','.join('?' * len(keys))})"  # noqa: S608
        return self._keys.execute(query, keys).fetchone() is None

    def close(self) -> None:
        """Throw the keys away."""
        self._keys.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def read_known(batches: Batches, manifest: Manifest, known: KnownRows) -> None:
    """Note the rows of all runs of a batch.

    Raises `ConfigurationError` where it cannot grow, or some of its runs are gone.
    """
    name = f"batch {manifest.batch_id} of this file"
    if manifest.cancel_requested:
        raise ConfigurationError(f"{name} was cancelled, and gets no more runs: {_ANEW}")
    if not manifest.sealed and not is_stalled(manifest, await batches.now()):
        msg = f"{name} is being submitted, or was a moment ago; repeat this command in 30 seconds"
        raise ConfigurationError(msg)
    for start in range(0, manifest.rows, READ_AT_ONCE):
        rows = range(start, min(start + READ_AT_ONCE, manifest.rows))
        known.add(await batches.rows([run_id_of(manifest.batch_id, row) for row in rows]))
    gone = manifest.total - known.runs
    if manifest.sealed and gone > 0:
        raise ConfigurationError(
            f"{name}: {gone:,} of its runs are past their retention or were removed, so it is not "
            f"known which rows they were; {_ANEW}, or give the new rows as a file of their own"
        )


def check_addition(manifest: Manifest, known: KnownRows, new: int, total: int) -> None:
    """Raise `ConfigurationError` where no row of the file is known: its rows cannot be compared."""
    if known.runs and new == total:
        by = "ids (--id-field)" if known.with_ids else "inputs (prompt, --input-field)"
        raise ConfigurationError(
            f"none of the file's {total:,} rows is in batch {manifest.batch_id} of this file, "
            f"which has {known.runs:,}: compare their {by}; or {_ANEW}"
        )


def _by_id(line_id: str) -> str:
    return f"id:{line_id}"


def _by_input(stored: bytes) -> str:
    return hashlib.sha256(stored).hexdigest()
