"""Reads the raw records of a store on a Redis Cluster, node by node; its broker is beside it."""

from collections.abc import Iterator, Sequence
from typing import Any

from redis import Redis, RedisCluster
from support.protocol.audit import DUMP, SHIFT, Auditor, call_of, hint_of, run_key, tag
from support.protocol.model import SHARDS, shard_of


class ClusterAuditor(Auditor):
    """The same as on one Redis: one call for each shard."""

    def __init__(self, nodes: RedisCluster, queues: Redis) -> None:
        super().__init__(queues)
        self._nodes = nodes

    def flush(self) -> None:
        self._nodes.flushall(target_nodes=RedisCluster.PRIMARIES)
        super().flush()

    def shift(self, run_ids: list[str], milliseconds: int) -> None:
        for due, mine in _by_shard(run_ids):
            given = [part for run_id in mine for part in (run_key(run_id), due, run_id)]
            self._eval(SHIFT, due, milliseconds, *given)

    def uncancel(self, batch: str) -> None:
        for shard in range(SHARDS):
            self._nodes.hdel(f"{tag(shard)}flags", f"x:{batch}")

    def waiting(self, circuit: str) -> set[str]:
        sets = (self._nodes.smembers(f"{tag(shard)}service:{circuit}") for shard in range(SHARDS))
        return {str(one) for found in sets for one in found}

    def newest_messages(self, count: int) -> list[tuple[str, int]]:
        """Return the hints that were published last; they join the queue's other end."""
        return [hint_of(str(one)) for one in self._client.lrange("stepfleet", 0, count - 1)]

    def newest_at_both_ends(
        self, ahead: int, behind: int
    ) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """Return what was published first and then; all of it joins the queue's end."""
        told = self.newest_messages(ahead + behind) if ahead + behind else []
        return told[behind:], told[:behind]

    def newest_calls(self, count: int) -> list[tuple[str, int, int]]:
        """Return the tool calls that were published last."""
        return [call_of(str(one)) for one in self._client.lrange("heavy", 0, count - 1)]

    def _read(self, run_ids: list[str]) -> Any:
        first = 0
        shards: list[Any] = []
        read: dict[str, Any] = {}
        for number, (due, mine) in enumerate(_by_shard(run_ids)):
            now, _, [shard], runs, _ = self._eval(DUMP, due, number, number, *map(run_key, mine))
            first = first or now
            shards.append(shard)
            read.update(zip(mine, runs, strict=True))
        queued, calls = (self._client.llen(name) for name in ("stepfleet", "heavy"))
        return first, queued, shards, [read[run_id] for run_id in run_ids], calls

    def _eval(self, script: str, key: str, *args: object) -> Any:
        return self._nodes.eval(script, 1, key, *map(str, args))


def _by_shard(run_ids: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for shard in range(SHARDS):
        yield f"{tag(shard)}due", [one for one in run_ids if shard_of(one) == shard]
