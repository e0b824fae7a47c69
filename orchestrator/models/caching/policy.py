"""Whether, and for how long, the response cache answers an agent's model calls."""

from pydantic import Field

from stepfleet.orchestrator.records.base import Record

LONGEST_SECONDS = 366 * 24 * 3600


class CachePolicy(Record):
    """An agent with such a policy shares its model's answers among all runs with equal requests.

    An entry lives for `ttl` seconds. Answers above `max_entry_bytes` (JSON) are not kept. With
    `models` only calls of these models take part, as `provider:name`; without, whichever model the
    run has. With `refresh` no entry is read: the call is made, and its answer replaces the entry.
    """

    ttl: int = Field(default=86_400, ge=1, le=LONGEST_SECONDS)
    max_entry_bytes: int = Field(default=262_144, ge=1)
    models: tuple[str, ...] = ()
    refresh: bool = False

    def covers(self, model: str) -> bool:
        """Return whether calls of that model take part."""
        return not self.models or model in self.models
