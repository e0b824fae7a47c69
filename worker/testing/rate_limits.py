"""Rate limits of a service: token buckets for each model and key. Pure; the caller has the clock.

A request is admitted where every bucket has room for it. One that needs more than a full bucket is
admitted by a full one, which then owes the rest: no request waits for ever, and the rate holds.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from stepfleet.worker.testing.scenario import Usage

REQUESTS, INPUT, OUTPUT, TOKENS = "requests", "input_tokens", "output_tokens", "tokens"
IN_FLIGHT = "in_flight"
_KINDS = (REQUESTS, INPUT, OUTPUT, TOKENS)
_NAMES = {
    REQUESTS: "requests per min (RPM)",
    INPUT: "input tokens per min (ITPM)",
    OUTPUT: "output tokens per min (OTPM)",
    TOKENS: "tokens per min (TPM)",
    IN_FLIGHT: "concurrent requests",
}
_MINUTE = 60.0
_MOST_ACCOUNTS = 10_000
_IN_FLIGHT_WAIT = 1.0
_ROUNDED = 1e-6


@dataclass(frozen=True)
class RateLimit:
    """What each model and key may use in a minute; None means no limit.

    A bucket holds `burst` seconds of its rate, and at least one request or token. `in_flight`
    bounds the requests that are open at once. A request costs what its answer counts, and pays when
    it arrives.
    """

    requests: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    tokens: float | None = None
    burst: float = 2.0
    in_flight: int | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` that names the field of an invalid limit."""
        for name, value in vars(self).items():
            given = value is not None or name == "burst"
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if given and not (number and math.isfinite(value) and value > 0):
                raise ValueError(f"RateLimit.{name} is {value!r}; it is a number above 0")
        if self.in_flight is not None and not isinstance(self.in_flight, int):
            raise ValueError(f"RateLimit.in_flight is {self.in_flight}; it is a whole number")

    @property
    def rates(self) -> dict[str, float]:
        """The limits that are set, by kind, for a minute."""
        given = {kind: getattr(self, kind) for kind in _KINDS}
        return {kind: float(rate) for kind, rate in given.items() if rate is not None}

    def capacity(self, kind: str) -> float:
        """Return how much a full bucket holds."""
        return max(self.rates[kind] * self.burst / _MINUTE, 1.0)


@dataclass(frozen=True)
class RateStanding:
    """How a model and key stand to one limit: what is left, and the seconds until all is back."""

    limit: float
    remaining: float
    reset: float


@dataclass(frozen=True)
class Admission:
    """The verdict on one request: `refused` names the kind that has no room, "" for none.

    `wait` is the seconds until there is room.
    """

    standings: Mapping[str, RateStanding]
    refused: str = ""
    wait: float = 0.0

    @property
    def message(self) -> str:
        """Why the request is refused."""
        limit = self.standings[self.refused].limit if self.refused in self.standings else None
        over = "" if limit is None else f": Limit {limit:g}"
        return (
            f"Rate limit reached on {_NAMES[self.refused]}{over}. "
            f"Please try again in {self.wait:.3f}s."
        )


@dataclass
class _Account:
    """The buckets of one model and key."""

    limit: RateLimit
    at: float
    levels: dict[str, float] = field(default_factory=dict)
    open: int = 0

    def refill(self, limit: RateLimit, now: float) -> None:
        # Until now the earlier rates held.
        earlier, seconds, self.at = self.limit.rates, max(now - self.at, 0.0), now
        for kind in limit.rates:
            full = limit.capacity(kind)
            level = self.levels.get(kind, full) + earlier.get(kind, 0.0) * seconds / _MINUTE
            self.levels[kind] = min(level, full)
        self.limit = limit

    def wait(self, kind: str, cost: float) -> float:
        lacking = min(cost, self.limit.capacity(kind)) - self.levels[kind]
        return lacking * _MINUTE / self.limit.rates[kind] if lacking > _ROUNDED else 0.0

    def standings(self) -> dict[str, RateStanding]:
        rates = self.limit.rates
        return {
            kind: RateStanding(rate, max(self.levels[kind], 0.0), self.wait(kind, math.inf))
            for kind, rate in rates.items()
        }


class RateLimiter:
    """Admits requests by the limit of their model, or by that of all models ("").

    `limits` may be replaced at any time, from any thread; buckets keep their levels.
    """

    def __init__(self, limits: Mapping[str, RateLimit] | None = None) -> None:
        self.limits: Mapping[str, RateLimit] = dict(limits or {})
        self._accounts: OrderedDict[tuple[str, str], _Account] = OrderedDict()

    def change(self, limit: RateLimit | None, model: str = "") -> None:
        """Limit the model, or all that have no limit of their own; None lifts the limit."""
        others = {name: one for name, one in self.limits.items() if name != model}
        self.limits = others if limit is None else {**others, model: limit}

    def admit(self, model: str, key: str, usage: Usage, now: float) -> Admission | None:
        """Return the verdict on a request, charged where it is admitted; None without a limit.

        `now` is in seconds. `release` follows each admission.
        """
        limit = self.limits.get(model) or self.limits.get("")
        if limit is None:
            return None
        account = self._account(model, key, limit, now)
        costs = {
            REQUESTS: 1,
            INPUT: usage.prompt_tokens,
            OUTPUT: usage.completion_tokens,
            TOKENS: usage.prompt_tokens + usage.completion_tokens,
        }
        waits = {kind: account.wait(kind, costs[kind]) for kind in limit.rates}
        if limit.in_flight is not None and account.open >= limit.in_flight:
            waits[IN_FLIGHT] = _IN_FLIGHT_WAIT
        slowest = max(waits, key=lambda kind: waits[kind], default="")
        if slowest and waits[slowest] > 0:
            return Admission(account.standings(), slowest, waits[slowest])
        for kind in limit.rates:
            account.levels[kind] -= costs[kind]
        account.open += 1
        return Admission(account.standings())

    def release(self, model: str, key: str) -> None:
        """End an admitted request."""
        if account := self._accounts.get((model, key)):
            account.open -= 1

    def _account(self, model: str, key: str, limit: RateLimit, now: float) -> _Account:
        account = self._accounts.get((model, key))
        if account is None:
            account = self._accounts[model, key] = _Account(limit, now)
            if len(self._accounts) > _MOST_ACCOUNTS:
                self._accounts.popitem(last=False)
        self._accounts.move_to_end((model, key))
        account.refill(limit, now)
        return account
