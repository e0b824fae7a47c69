"""What the response cache had to do with a model call. Pure values; knows no cache."""

from stepfleet.orchestrator.records.base import Record


class CacheUse(Record):
    """How a step's model call met the response cache.

    `key` names the request: SHA-256 (hex) of its canonical form. With `hit` the answer is a stored
    one: no call was made, so the step has no tokens and no cost; `saved_tokens` and `saved_usd`
    (USD) are what the call took that the answer is from, 0 where that is not known.
    """

    key: str
    hit: bool = False
    saved_tokens: int = 0
    saved_usd: float = 0.0
