"""Names of keys. Every key of a run carries its shard's hash tag (Redis Cluster, one slot)."""

import binascii
from dataclasses import dataclass
from functools import cache

from stepfleet.orchestrator.errors import ConfigurationError

PREFIX = "sf"
AGENTS = f"{PREFIX}:agents"
USED = f"{PREFIX}:{{agents}}:used"
SWEPT = f"{PREFIX}:{{agents}}:swept"
NAMES = f"{PREFIX}:agent-names"
BATCHES = f"{PREFIX}:batches"
WORKERS = f"{PREFIX}:workers"
KEEPERS = f"{PREFIX}:keepers"
SHARDS = f"{PREFIX}:shards"
SWEEPS = f"{PREFIX}:sweeps"
FOLLOW_UPS = f"{PREFIX}:follow-ups"
UPKEEP = f"{PREFIX}:upkeep"
AUDIT = f"{PREFIX}:audit"
TIDIED = f"{PREFIX}:tidied"
RESCUER = f"{PREFIX}:rescuer"
SCALE = f"{PREFIX}:scale"
FIGURES = f"{PREFIX}:figures"
CIRCUITS = f"{PREFIX}:circuits"
QUARANTINE = f"{PREFIX}:quarantine"
_ARCHIVE = f"{PREFIX}:{{archive}}"
ARCHIVE_FILES = f"{_ARCHIVE}:files"
ARCHIVE_ORDER = f"{_ARCHIVE}:order"
ARCHIVE_OPEN = f"{_ARCHIVE}:open"
ARCHIVE_BATCHES = f"{_ARCHIVE}:batches"
ARCHIVE_STATE = f"{_ARCHIVE}:state"
ARCHIVE_TURN = f"{_ARCHIVE}:turn"
_SCHEDULES = f"{PREFIX}:{{schedules}}"
SCHEDULES = f"{_SCHEDULES}:all"
SCHEDULE_STATES = f"{_SCHEDULES}:states"
SCHEDULE_TICKS = f"{_SCHEDULES}:next"
SCHEDULE_AGENTS = f"{_SCHEDULES}:agents"
SCHEDULE_ROWS = f"{_SCHEDULES}:rows:"
SCHEDULE_TURNS = f"{_SCHEDULES}:turn:"
_LIMITS = f"{PREFIX}:{{limits}}"
LIMIT_SETTINGS = f"{_LIMITS}:settings"
LIMIT_STATE = f"{_LIMITS}:state"
LIMIT_GRANTS = f"{_LIMITS}:grants"
LIMIT_WAITING = f"{_LIMITS}:waiting"
LIMIT_LINES = f"{_LIMITS}:lines"
LIMIT_SPENT = f"{_LIMITS}:spent"
LIMIT_RESERVED = f"{_LIMITS}:reserved"


@cache
def _tag(prefix: str, shard: int) -> str:
    return f"{prefix}{PREFIX}:{{s{shard:02d}}}:"


def _encoded(given: str) -> bytes:
    """Return an id's bytes. Raises `ConfigurationError` unless it is text in valid UTF-8."""
    try:
        return str.encode(given)
    except TypeError:
        kind = type(given).__name__
        raise ConfigurationError(f"the id is of type {kind}; write text, such as str(id)") from None
    except UnicodeEncodeError:
        shown = ascii(given[:50])
        raise ConfigurationError(f"the id {shown} is not valid text; copy it again") from None


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a store with `shards` shards (fixed when the store is first used).

    `prefix` begins every key, so that several fleets can share one database.
    """

    shards: int = 16
    prefix: str = ""

    def of(self, name: str) -> str:
        """Return the full name of a key, or of a channel, that belongs to no shard."""
        return self.prefix + name

    def shard_of(self, run_id: str) -> int:
        """Return the run's shard: CRC16 of its id (as Redis Cluster hashes keys)."""
        return binascii.crc_hqx(_encoded(run_id), 0) % self.shards

    def tag(self, shard: int) -> str:
        """Return the prefix that all keys of a shard share."""
        return _tag(self.prefix, shard)

    def run(self, run_id: str) -> str:
        """Return the key of the run's header; its other keys extend it."""
        return f"{self.tag(self.shard_of(run_id))}run:{run_id}"

    def due(self, shard: int) -> str:
        """Return the key of the shard's index of active runs."""
        return f"{self.tag(shard)}due"

    def archived(self, run_id: str) -> str:
        """Return the key of the numbers of archived runs' files: one of 256 of the run's shard."""
        return f"{self.tag(self.shard_of(run_id))}archived:{run_id[-2:]}"

    def aging(self, shard: int) -> str:
        """Return the key of the shard's ended runs without a batch that are to be archived."""
        return f"{self.tag(shard)}aging"

    def batch(self, shard: int, batch_id: str) -> str:
        """Return the key of one shard's counters of a batch."""
        return f"{self.tag(shard)}batch:{batch_id}"

    def ended(self, shard: int, batch_id: str) -> str:
        """Return the key of one shard's index of a batch's ended runs."""
        return f"{self.batch(shard, batch_id)}:ended"

    def over(self, shard: int) -> str:
        """Return the key of the shard's index of batches that may have ended, or begun anew."""
        return f"{self.tag(shard)}over"

    def tidied(self, shard: int) -> str:
        """Return the key of the places up to which the shard's lists of runs are right."""
        return f"{self.tag(shard)}tidied"

    def flags(self, shard: int) -> str:
        """Return the key of the shard's requests to whole batches, and to the fleet."""
        return f"{self.tag(shard)}flags"

    def manifest(self, batch_id: str) -> str:
        """Return the key of the manifest of a batch."""
        _encoded(batch_id)
        return self.of(f"{PREFIX}:{{b:{batch_id}}}:manifest")

    def script_keys(self, run_id: str, queue: str | None) -> list[str]:
        """Return KEYS of a run's script: header, due index and, if it pushes, the broker list."""
        tag = self.tag(self.shard_of(run_id))
        keys = [f"{tag}run:{run_id}", f"{tag}due"]
        return [*keys, queue] if queue else keys


NO_PREFIX = Keys()
"""For what is the same with any number of shards, in a store without a prefix."""
