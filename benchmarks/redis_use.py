"""What Redis was asked to do, by its own counters. Decides which counter means what.

`total_commands_processed`, and the calls in `INFO commandstats`, count what scripts call inside as
well as what clients send (seen with Redis 7.0: a script of ten calls counts eleven). Clients alone
send EVALSHA, EVAL and FCALL, so their calls are the scripts. `total_reads_processed` counts reads
from sockets: commands that travel together are one, which makes it the round trips.
"""

from dataclasses import dataclass

import redis

SCRIPTS = ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_fcall")


@dataclass(frozen=True)
class Use:
    """Counters since the server's start; a difference of two has the same fields."""

    commands: int
    scripts: int
    reads: int
    memory: int

    def since(self, before: "Use") -> "Use":
        """Return what was added after `before`; memory in bytes."""
        return Use(
            self.commands - before.commands,
            self.scripts - before.scripts,
            self.reads - before.reads,
            self.memory - before.memory,
        )


def use(client: redis.Redis) -> Use:
    """Return the counters now."""
    stats = client.info("stats")
    calls = client.info("commandstats")
    return Use(
        commands=int(stats["total_commands_processed"]),
        scripts=sum(int(calls[name]["calls"]) for name in SCRIPTS if name in calls),
        reads=int(stats.get("total_reads_processed", 0)),
        memory=int(client.info("memory")["used_memory"]),
    )
