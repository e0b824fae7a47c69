"""What Redis's errors mean for whoever called: pure judgement, and the log lines about it.

Decides which errors pass when one waits, and says each trouble once. Must not know what was called.
"""

import enum
import logging
import re
from typing import Any

from redis import exceptions

from stepfleet.orchestrator.errors import ConfigurationError, StoreError

log = logging.getLogger(__name__)

QUIET_SECONDS = 1.0
"""A trouble is over when calls are answered and none has failed for so long."""


class TransientError(enum.Enum):
    """An error that passes: the call waits and is made again."""

    AWAY = "does not answer"
    REFUSES = "refuses commands"
    ELSEWHERE = "takes no writes here"
    """The master may be another server by now: connections are to be made anew."""
    MOVING = "is moving data"
    """One slot of a cluster; the others are well."""


_BY_TYPE = (
    ((exceptions.ConnectionError, exceptions.TimeoutError, OSError), TransientError.AWAY),
    ((exceptions.ReadOnlyError, exceptions.MasterDownError), TransientError.ELSEWHERE),
    ((exceptions.TryAgainError, exceptions.ClusterDownError), TransientError.MOVING),
    (exceptions.OutOfMemoryError, TransientError.REFUSES),
)
_BY_WORDS = (
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
    """Return what kind of passing trouble a reply is; None for answers and lasting errors."""
    if not isinstance(value, Exception):
        return None
    for kind, trouble in _BY_TYPE:
        if isinstance(value, kind):
            return trouble
    if isinstance(value, exceptions.ResponseError):
        for words, trouble in _BY_WORDS:
            if words.search(str(value)):
                return trouble
    return None


def explained(error: BaseException) -> BaseException:
    """Return the error that a caller gets: a passing one as `StoreError` that names the fix."""
    if isinstance(error, exceptions.MovedError):
        msg = "this is a node of a Redis Cluster: set STEPFLEET_REDIS_URL=redis+cluster://HOST:PORT"
        return ConfigurationError(msg)
    trouble = transient_error_of(error)
    if trouble is None:
        return error
    if trouble is TransientError.AWAY:
        return StoreError(f"Redis cannot be reached: {error}")
    told = str(error)
    fix = next((fix for mark, fix in _FIXES if mark in told), "see what it lacks")
    return StoreError(f"Redis refuses: {error}; {fix}")


class Watch:
    """Says a trouble once, when it begins, and once when it is over. Times are monotonic."""

    def __init__(self, what: str = "Redis") -> None:
        self.trouble: TransientError | None = None
        self._what = what
        self._began = 0.0
        self._failed = 0.0

    def failed(self, trouble: TransientError, error: BaseException, now: float) -> None:
        """Note that a call failed."""
        if self.trouble is None:
            self.trouble, self._began = trouble, now
            said = str(error)[:200]
            log.warning("%s %s (%s); waiting for it", self._what, trouble.value, said)
        self._failed = now

    def answered(self, now: float) -> None:
        """Note that calls were answered, and none that failed waits."""
        if self.trouble is not None and now - self._failed >= QUIET_SECONDS:
            self.trouble = None
            log.warning("%s answers again, after %.1f s", self._what, now - self._began)
