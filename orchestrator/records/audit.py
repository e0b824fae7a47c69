"""An entry of the audit stream: who changed what. Says nothing of inputs."""

from dataclasses import dataclass

from stepfleet.orchestrator.records.base import Record


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts: a user, the machine of the process, and its kind as in an entry's `source`."""

    user: str
    host: str
    source: str


class AuditEntry(Record):
    """An action that somebody took. `detail` is `requested`, or how it ended.

    `source` is `stepfleet cancel` or another command, `client` for code, or `flower`; `host` is
    the machine of that process. Both are empty in entries of versions that wrote neither.
    """

    at: str
    user: str
    action: str
    target: str
    detail: str
    host: str = ""
    source: str = ""
