"""What is used of limits at one moment, as people see it. Pure."""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

import orjson
from pydantic import Field

from stepfleet.orchestrator.limits.budgets import FIELDS, KINDS, SCALES, raising
from stepfleet.orchestrator.limits.limit import Limit
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.ledger import Usd

RAISE = "; raise it: "
_WHOLE = re.compile(r"-?\d+")


class BudgetUse(Record):
    """A budget, in the unit of its field: what was spent, what calls under way may spend.

    `over` is by how much it was exceeded: calls cost more than they were expected to.
    """

    field: str
    budget: Usd
    spent: Usd
    reserved: Usd
    left: Usd
    over: Usd = Decimal(0)


class LimitUse(Record):
    """A limit and what is used of it at this moment.

    `in_flight` calls are under way or about to begin; `levels` are what is left of each rate in
    this moment (below 0: more was taken than there was), of the most that it can be, `rooms`:
    `burst` seconds of the rate. `waiting` steps wait in its line; `fix` is the command by which
    those go on that a spent budget holds. Nobody calls under it for `cool_seconds` more; `refused`
    calls got a 429. `learned` are rates per minute that the provider's headers and refusals have
    shown, where they are lower than the configured ones.
    """

    name: str
    limit: Limit | None = None
    in_flight: int = 0
    levels: dict[str, float] = Field(default_factory=dict)
    rooms: dict[str, float] = Field(default_factory=dict)
    waiting: int = 0
    cool_seconds: float = 0.0
    refused: int = 0
    learned: dict[str, float] = Field(default_factory=dict)
    waits_for: str = ""
    fix: str = ""
    budgets: tuple[BudgetUse, ...] = ()


_LEVELS = {
    "r": "requests_per_minute",
    "t": "tokens_per_minute",
    "i": "input_tokens_per_minute",
    "o": "output_tokens_per_minute",
    "s": "starts_per_minute",
}
_SHORT = {
    **_LEVELS,
    **FIELDS,
    "c": "a pause after a 429",
    "f": "calls in flight",
    "w": "a look into the ledger for the budgets",
}


def short_of(why: str) -> str:
    """Return for people what the script notes of a limit that has no room: `name kind`."""
    name, _, kind = why.rpartition(" ")
    shown = _SHORT.get(kind, kind)
    return f"{shown.replace('_', ' ')} of {name}" if name else ""


def raised_by(waits_for: str) -> str:
    """Return how those go on that wait for this; nothing where it is no budget."""
    shown, _, name = waits_for.partition(" of ")
    field = shown.replace(" ", "_")
    return f"{RAISE}{raising(name, field)}" if field in FIELDS.values() else ""


def budget_uses(limit: Limit, *texts: str | None) -> tuple[BudgetUse, ...]:
    """Return the use of a limit's budgets: spent in all, today, and reserved, as stored."""
    whole, today, reserved = (_numbers(text) for text in texts)
    uses = []
    for code, field in FIELDS.items():
        if field not in limit.budgets:
            continue
        scale = SCALES[code[0]]
        held = Decimal(reserved[code[0]]) / scale
        spent = Decimal((today if code.endswith("d") else whole)[code[0]]) / scale
        budget = Decimal(str(getattr(limit, field)))
        left, over = max(budget - spent - held, Decimal(0)), max(spent - budget, Decimal(0))
        numbers = {"budget": budget, "spent": spent, "reserved": held, "left": left, "over": over}
        uses.append(BudgetUse(field=field, **numbers))
    return tuple(uses)


def state_of(text: str | None) -> dict[str, Any]:
    """Return the stored level of a limit; nothing where it cannot be read, as the script does."""
    with suppress(ValueError):
        found = orjson.loads(text or "{}")
        return found if isinstance(found, dict) else {}
    return {}


def _numbers(text: str | None) -> dict[str, int]:
    parts = [int(one) for one in _WHOLE.findall(text or "")]
    return dict(zip(KINDS, (parts + [0] * len(KINDS))[: len(KINDS)], strict=True))


def use_of(
    name: str, limit: Limit | None, state: dict[str, Any], waiting: Mapping[str, int], now: float
) -> LimitUse:
    """Return the use of a limit from its stored state; `now` in milliseconds of Redis's clock."""
    waits_for = short_of(state.get("why", "")) if waiting.get(name) else ""
    learned = _learned(limit, state.get("l") or {})
    rooms, levels = _levels(limit, learned, state, now)
    return LimitUse(
        name=name,
        limit=limit if limit and limit.model_fields_set else None,
        in_flight=int(state.get("f", 0)),
        levels=levels,
        rooms=rooms,
        waiting=waiting.get(name, 0),
        cool_seconds=max(round((state.get("cool", 0) - now) / 1000, 1), 0.0),
        refused=int(state.get("refused", 0)),
        learned=learned,
        waits_for=waits_for,
        fix=raised_by(waits_for).removeprefix(RAISE),
    )


def _levels(
    limit: Limit | None, learned: Mapping[str, float], state: Mapping[str, Any], now: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the most that may be left of each rate, and what is left now: as the script counts."""
    gone = max(now - max(state.get("at", now), state.get("cool", 0)), 0) / 60_000
    rooms, levels = {}, {}
    for kind, field in _LEVELS.items():
        rate = min(getattr(limit, field, None) or math.inf, learned.get(field, math.inf))
        if rate < math.inf:
            most = max(rate / 60 * (limit.burst if limit else 1.0), 1)
            rooms[field] = round(most, 3)
            levels[field] = round(min(most, state.get(kind, most) + gone * rate), 3)
    return rooms, levels


def _learned(limit: Limit | None, known: Mapping[str, Any]) -> dict[str, float]:
    """Return the learned rates that hold: nothing for a limit that somebody has removed."""
    if limit is None:
        return {}
    rates = dict(known.get("said") or {})
    if known.get("r") is not None:
        rates["r"] = min(rates.get("r", known["r"]), known["r"])
    return {field: round(rates[kind], 1) for kind, field in _LEVELS.items() if kind in rates}
