"""A limit that the whole fleet shares, and its name."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.limits.budgets import FIELDS, KINDS, SCALES, STOP, Exhausted, Spending
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.text.validation import explain_invalid, meant

TENANT, BATCH, AGENT, RUN = "tenant", "batch", "agent", "run"
EACH = (TENANT, BATCH, AGENT, RUN)
"""With `*` as the name of one of these, the limit holds for each of them by itself."""
SEPARATOR = "\x1f"
AT = " at "
"""Between a model and the address and account of its calls, in the name of their limits."""
LEAST, MOST = 1e-3, 1e12
LONGEST_NAME = 800
PRIORITIES = ("high", "normal", "low")
NORMAL = PRIORITIES.index("normal")
_CHOICE = "'high', 'normal' or 'low'"
_FIELDS = "fields with numbers, such as in_flight=20 or usd=5"
_NAME = re.compile(r"[^:\s\ud800-\udfff]+:[^\x00-\x1f\ud800-\udfff]+")
_RATE = Field(default=None, ge=LEAST, le=MOST)
_MONEY = Field(default=None, gt=0, le=1_000_000)
_COUNT = Field(default=None, gt=0, le=MOST)


class Limit(Record):
    """What all calls under one name may take together, in the whole fleet.

    Rates are per minute; `starts_per_minute` counts the first steps of runs alone. `in_flight` is
    the number of calls at once. `burst` is how many seconds of a rate may be used in one moment.
    `weight` is a tenant's share where several wait. Without `learn` a model's limits do not follow
    from what its provider refuses and states.

    The others are budgets, in all or by days (UTC): USD, tokens, model calls, seconds of steps.
    Where one is spent, runs end by `on_budget` "stop", or wait by "hold" until it is raised.
    """

    requests_per_minute: float | None = _RATE
    tokens_per_minute: float | None = _RATE
    input_tokens_per_minute: float | None = _RATE
    output_tokens_per_minute: float | None = _RATE
    starts_per_minute: float | None = _RATE
    in_flight: int | None = Field(default=None, ge=1, le=10_000_000)
    burst: float = Field(default=1.0, gt=0, le=3600)
    weight: float = Field(default=1.0, gt=0, le=1_000_000)
    usd: float | None = _MONEY
    usd_per_day: float | None = _MONEY
    tokens: int | None = _COUNT
    tokens_per_day: int | None = _COUNT
    calls: int | None = _COUNT
    calls_per_day: int | None = _COUNT
    active_seconds: float | None = _COUNT
    active_seconds_per_day: float | None = _COUNT
    on_budget: Literal["stop", "hold"] = STOP
    learn: bool = True

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.model_fields_set - {"burst", "on_budget"} or (
            self.model_fields_set == {"learn"} and self.learn
        ):
            raise ValueError("it limits nothing; write requests_per_minute, in_flight or another")
        if "on_budget" in self.model_fields_set and not self.budgets:
            raise ValueError("field 'on_budget' is for budgets: write usd, tokens, calls or others")
        return self

    @property
    def budgets(self) -> frozenset[str]:
        """The fields that are budgets, of those that are set."""
        return _BUDGETS & self.model_fields_set


Limits = Mapping[str, Limit]
_BUDGETS = frozenset(FIELDS.values())
_OF_RUNS = frozenset({*KINDS.values(), "on_budget"})


NO_LIMIT = Limit.model_construct(_fields_set=set())
"""A limit that says nothing, which nobody could set."""


def limit_of(name: str, given: Any) -> Limit:
    """Return the limit of that name, from fields. Raises `ConfigurationError` with the fix."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        msg = (
            f"limit {name!r}: name a model ('openai:gpt-4o-mini', 'openai:*'), or 'tenant:acme', "
            "'batch:*', 'agent:clerk', 'run:*'"
        )
        raise ConfigurationError(msg)
    try:
        found = given if isinstance(given, Limit) else Limit.model_validate(given)
    except ValidationError as error:
        text = explain_invalid(error, record=Limit).removeprefix("field '<root>': ")
        raise ConfigurationError(f"limit {name!r}: {text}") from None
    if "weight" in found.model_fields_set and kind_of(name) != TENANT:
        raise ConfigurationError(f"limit {name!r}: field 'weight' is for tenants only")
    if "learn" in found.model_fields_set and kind_of(name) in EACH:
        raise ConfigurationError(f"limit {name!r}: field 'learn' is for models only")
    if kind_of(name) == RUN and (wrong := sorted(found.model_fields_set - _OF_RUNS)):
        fix = f"a run has {', '.join(sorted(_OF_RUNS))} only"
        raise ConfigurationError(f"limit {name!r}: field {wrong[0]!r}: {fix}")
    return found


def exceeded(limit: Limit, name: str, before: Spending, wanted: Spending) -> Exhausted | None:
    """Return the budget in all that a call would exceed; None where there is room."""
    spent, more = before.stored(), wanted.stored()
    for kind, field in KINDS.items():
        budget = getattr(limit, field)
        if budget is None:
            continue
        most = round(budget * SCALES[kind])
        numbers = (spent.get(kind, 0), more.get(kind, 0))
        if numbers[0] >= most or sum(numbers) > most:
            return Exhausted.of(name, kind, most, *numbers)
    return None


def limits_from(given: Any) -> dict[str, Limit]:
    """Return limits by name, from a mapping. Raises `ConfigurationError` as `limit_of` does."""
    if not isinstance(given, Mapping):
        raise ConfigurationError("limits: write a table of limits by name")
    return {name: limit_of(name, fields) for name, fields in given.items()}


def changed(name: str, before: Limit | None, fields: Mapping[str, Any]) -> Limit:
    """Return the limit with these fields changed; None takes a field away.

    Raises `ConfigurationError` as `limit_of` does.
    """
    kept = before.model_dump(exclude_unset=True) if before else {}
    merged = {key: value for key, value in {**kept, **fields}.items() if value is not None}
    return limit_of(name, merged)


def priority_of(given: Any) -> int:
    """Return the rank of a priority by its name: 0 goes first. None is normal.

    Raises `ConfigurationError` for anything else.
    """
    if given is None:
        return NORMAL
    if given not in PRIORITIES:
        raise ConfigurationError(f"field 'priority' is {ascii(given)[:50]}; write {_CHOICE}")
    return PRIORITIES.index(given)


def own_limit(kind: str, given: Any) -> Limit | None:
    """Return the limit that a batch or a run (`kind`) is submitted with; None for nothing.

    It is given as fields, or as text like 'in_flight=20'. Raises `ConfigurationError` as `limit_of`
    does.
    """
    if not isinstance(given, Limit | Mapping | None):
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts):
            raise ConfigurationError(f"field 'limit' is {ascii(given)[:50]}; write {_FIELDS}")
        given = dict(map(parsed_field, texts))
    try:
        return limit_of(f"{kind}:*", given) if given else None
    except ConfigurationError as error:
        raise ConfigurationError(f"field 'limit': {str(error).partition(': ')[2]}") from None


def parsed_field(text: str) -> tuple[str, Any]:
    """Return field and value of `field=value`; `field=` is None. Raises `ConfigurationError`."""
    field, equals, value = text.partition("=")
    if field not in Limit.model_fields:
        fix = meant(field, Limit.model_fields) or f"; write one of {', '.join(Limit.model_fields)}"
        raise ConfigurationError(f"{text!r}: a limit has no field {field!r}{fix}")
    if not equals:
        raise ConfigurationError(f"{text!r}: write {field}=NUMBER, or {field}= to take it away")
    if field == "on_budget":
        return field, value or None
    if field == "learn":
        if value not in {"true", "false", ""}:
            raise ConfigurationError(f"{text!r}: write learn=false, or learn= to take it away")
        return field, value == "true" if value else None
    number = None
    with suppress(ValueError):
        number = json.loads(value.replace("_", "")) if value else None
    if (value and not isinstance(number, int | float)) or isinstance(number, bool):
        raise ConfigurationError(f"{text!r}: {value!r} is not a number")
    return field, number


def kind_of(name: str) -> str:
    """Return the part of a limit's name before the colon: a service, tenant, batch or agent."""
    return name.partition(":")[0]


def model_of(name: str) -> str:
    """Return the model of a limit's name, without an address and an account."""
    return name.partition(AT)[0]


def set_for(known: Limits, name: str) -> Limit | None:
    """Return the limit of that name; None where there is none.

    What people set for a model holds for each of its addresses and accounts by itself.
    """
    if (own := known.get(name)) is not None:
        return own
    model = known.get(model_of(name))
    return model if model is not None and model.model_fields_set else None


def is_limited(known: Limits, name: str) -> bool:
    """Return whether calls are under a limit of that name."""
    return set_for(known, name) is not None


def learns(known: Limits, name: str) -> bool:
    """Return whether limits of that name follow from what a provider refuses and states."""
    model = model_of(name)
    found = (known.get(one) for one in (name, model, f"{kind_of(model)}:*"))
    return all(one is None or one.learn for one in found)


def names_of(known: Limits, *, model: str, tenant: str, batch: str, agent: str) -> tuple[str, ...]:
    """Return the limits, among those that are `known`, that a step's call is under.

    `model` is the name of its model's limits, with an address and an account where it has its own.
    The first one is the line in which it waits: that of its model where one applies. Budgets of a
    model hold for all its addresses together.
    """
    found = [model] if is_limited(known, model) else []
    bare, service = model_of(model), f"{kind_of(model)}:*"
    if bare != model and bare in known and known[bare].budgets:
        found.append(bare)
    if service in known and service not in found:
        found.append(service)
    for kind, value in ((TENANT, tenant), (BATCH, batch), (AGENT, agent)):
        name = f"{kind}:{value}"
        if value and (name in known or f"{kind}:*" in known):
            found.append(name.replace(SEPARATOR, "?"))
    return tuple(found)


def limit_of_run(known: Limits, run_id: str) -> Limit | None:
    """Return the limit of one run, or of every run."""
    return known.get(f"{RUN}:{run_id}") or known.get(f"{RUN}:*")
