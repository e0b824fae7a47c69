"""The whole store of an earlier version as it was when its worker was killed, for tests.

`recovery/earlier_records.json` was written by commit 16e6ddbc with the agents of
`earlier_agents.py`; its values are base64. Times are moved, as if that moment were now.
"""

import base64
import json
import re
import time
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_DNS, uuid5

from redis import Redis

ACCEPTANCE = Path(__file__).parents[2] / "acceptance"
RECORDS = ACCEPTANCE / "recovery" / "earlier_records.json"
AGENTS = ACCEPTANCE / "agent_modules" / "earlier_agents.py"
DAY = 86_400_000
OUTPUTS = {
    "look-mid": "done: seen mid",  # its worker was killed in its second model call
    "look-stop": "done: seen stop",  # that too, and somebody had asked it to pause
    "look-flaky": "done: seen flaky",  # it waited for its second attempt
    "look-queued": "done: seen queued",
    "refund-Ann": "done: paid Ann",  # it waited for an approval
    "refund-Pam": "done: paid Pam",  # that too, and it was paused
    "ask-Ben": "done: blue",  # it waited for an answer
    "render-cat": "done: rendered cat",  # it waited for a worker of another queue
    "check-Cora": "done: done: paid Cora",  # it waited for a run that waited for an approval
    **{f"limited-{n}": f"done: seen limited {n}" for n in range(3)},  # they waited for a limit
}
ROWS = ["done: seen row 0", "done: seen row 1", "done: paid row 2", "done: paid row 3"]


def run(name: str) -> str:
    """Return the id of a run of the records."""
    return str(uuid5(NAMESPACE_DNS, name))


class Reader:
    """Writes the records to a Redis; numbers of ms around their moment become such around now."""

    def __init__(self, dumped: int) -> None:
        self._dumped = dumped
        self._later = int(time.time() * 1000) - dumped

    def _moved(self, found: re.Match[bytes]) -> bytes:
        stamp = int(found.group())
        near = abs(stamp - self._dumped) < 30 * DAY
        return b"%d" % (stamp + self._later) if near else found.group()

    def value(self, text: str) -> bytes:
        """Return a value or name as it is written now."""
        return re.sub(rb"(?<!\d)\d{13}(?!\d)", self._moved, base64.b64decode(text))

    def write(self, store: Redis, key: str, kind: str, value: Any) -> None:
        """Write one key."""
        if kind == "string":
            store.set(key, self.value(value))
        elif kind == "hash":
            store.hset(key, mapping={self.value(k): self.value(v) for k, v in value.items()})
        elif kind == "list":
            store.rpush(key, *map(self.value, value))
        elif kind == "set":
            store.sadd(key, *map(self.value, value))
        elif kind == "zset":
            scores = {self.value(one): score for one, score in value}
            store.zadd(key, {one: self._score(score) for one, score in scores.items()})
        else:
            for stamp, fields in value:
                entry: Any = {self.value(k): self.value(v) for k, v in fields.items()}
                store.xadd(key, entry, id=stamp)

    def _score(self, score: float) -> float:
        return score + self._later if abs(score - self._dumped) < 30 * DAY else score


def read_in(url: str) -> None:
    records = json.loads(RECORDS.read_bytes())
    reader = Reader(records["dumped"])
    with Redis.from_url(url) as store:
        for one in records["keys"]:
            reader.write(store, one["key"], one["type"], one["value"])
