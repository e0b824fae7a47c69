"""Which errors of Redis are transient, the errors that callers get, and the log lines of an outage.

Decides which calls are worth a repetition, and logs each outage once. Must not know the calls.
"""

import enum
import logging
import re
from typing import Any

from redis import exceptions

from stepfleet.orchestrator.errors import ConfigurationError, StoreError

log = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0
"""How often a lasting outage is logged again."""
QUIET_SECONDS = 1.0
"""An outage is over when calls are answered and none has failed for this time."""


class TransientError(enum.Enum):
    """A kind of error that passes: the call waits and is repeated."""

    AWAY = "does not answer"
    REFUSES = "refuses commands"
    ELSEWHERE = "takes no writes here"
    """Another server may be the master by now: connections are made anew."""
    MOVING = "is moving data"
    """One slot of a cluster; the others work."""


_BY_TYPE = (
    ((exceptions.ConnectionError, exceptions.TimeoutError, OSError), TransientError.AWAY),
    ((exceptions.ReadOnlyError, exceptions.MasterDownError), TransientError.ELSEWHERE),
    ((exceptions.TryAgainError, exceptions.ClusterDownError), TransientError.MOVING),
    (exceptions.OutOfMemoryError, TransientError.REFUSES),
)
_BY_TEXT = (
    (re.compile(r"\b(OOM|MISCONF|BUSY)\b|used memory > 'maxmemory'"), TransientError.REFUSES),
    (re.compile(r"\b(NOREPLICAS|MASTERDOWN)\b"), TransientError.ELSEWHERE),
)
_FIXES = (
    ("maxmemory", "raise its maxmemory, or remove ended runs (stepfleet purge)"),
    ("read only", "it is a replica: name its master, or its Sentinels (sentinel://...)"),
    ("BUSY", "a script blocks it: redis-cli SCRIPT KILL"),
    ("MISCONF", "it cannot write to its disk: see its log"),
    ("NOREPLICAS", "bring its replicas back"),
    ("rehashing of slot", "the cluster moves this part of it: wait, or raise STEPFLEET_PATIENCE"),
    ("cluster is down", "bring its masters back, or promote their replicas"),
    ("slot not served", "bring its masters back, or promote their replicas"),
    ("serves the slot", "bring its masters back, or promote their replicas"),
)


def transient_error_of(value: Any) -> TransientError | None:
    """Return the kind of a transient error; None for answers and lasting errors."""
    if not isinstance(value, Exception):
        return None
    for types, kind in _BY_TYPE:
        if isinstance(value, types):
            return kind
    if isinstance(value, exceptions.ResponseError):
        for words, kind in _BY_TEXT:
            if words.search(str(value)):
                return kind
    return None


def explained(error: BaseException) -> BaseException:
    """Return the error for a caller: a transient one becomes a `StoreError` that names the fix."""
    if isinstance(error, exceptions.MovedError):
        msg = "this is a node of a Redis Cluster: set STEPFLEET_REDIS_URL=redis+cluster://HOST:PORT"
        return ConfigurationError(msg)
    kind = transient_error_of(error)
    if kind is None:
        return error
    if kind is TransientError.AWAY:
        return StoreError(f"Redis cannot be reached: {error}")
    return StoreError(f"Redis refuses: {error}{_fix_of(error) or '; see what it lacks'}")


def _fix_of(error: BaseException) -> str:
    """Return the fix of a known refusal, after a semicolon."""
    return next((f"; {fix}" for mark, fix in _FIXES if mark in str(error)), "")


class OutageLog:
    """Logs an outage as it begins, each minute of it, and its end. Times are monotonic."""

    def __init__(self, server: str = "Redis") -> None:
        self.current: TransientError | None = None
        self._server = server
        self._began = 0.0
        self._failed = 0.0
        self._logged = 0.0

    def failed(self, kind: TransientError, error: BaseException, now: float) -> None:
        """Note that a call failed."""
        begins = self.current is None
        if begins or now - self._logged >= AGAIN_SECONDS:
            since = "" if begins else f", for {now - self._began:.0f} s now"
            text = f"{str(error)[:200]}{_fix_of(error)}"
            log.warning("%s %s (%s); waiting for it%s", self._server, kind.value, text, since)
            self._logged = now
        if begins:
            self.current, self._began = kind, now
        self._failed = now

    def answered(self, now: float) -> None:
        """Note that calls were answered, and no failed call waits."""
        if self.current is not None and now - self._failed >= QUIET_SECONDS:
            self.current = None
            log.warning("%s answers again, after %.1f s", self._server, now - self._began)
