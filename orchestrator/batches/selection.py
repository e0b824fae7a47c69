"""Which of a batch's runs that did not complete are meant: `error~"gadgets",tool=stock`. Pure.

A condition is `field=value` or, for a part of it, `field~value`; letters' case does not count.
Conditions are joined by commas, and all of them must hold. A value with a comma is quoted.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run.facts import FailedRun

LONGEST = 2_000
"""Characters that conditions may have together."""
FIELDS = ("error", "code", "tool", "model", "step", "stop_reason", "cause", "agent", "tenant")
_LIMITS = {
    "max_steps": StopReason.STEPS_LIMIT,
    "cumulative_timeout": StopReason.TIME_LIMIT,
    "timeout": StopReason.TIME_LIMIT,
    "budget_usd": StopReason.GUARD,
    "budget": StopReason.GUARD,
}
"""Names of settings that are understood as the stop reason of their limit."""
_CANCELS = frozenset({"cause", "stop_reason"})
_CONDITION = re.compile(
    r'\s*(?P<field>[a-z_]+)\s*(?P<sign>[=~])\s*(?:"(?P<quoted>(?:[^"\\]|\\.)*+)"|(?P<plain>(?!")[^,]*+))'
    r"\s*(?:,|$)",
    re.DOTALL,
)
_EXAMPLE = 'write conditions as in error~"no such product",tool=stock'


@dataclass(frozen=True, slots=True)
class _Condition:
    field: str
    value: str
    is_part: bool

    def holds(self, run: FailedRun) -> bool:
        found = _value(run, self.field).casefold()
        return self.value in found if self.is_part else self.value == found


@dataclass(frozen=True, slots=True)
class Selection:
    """Conditions on runs; without any it selects all."""

    conditions: tuple[_Condition, ...] = ()

    @classmethod
    def parse(cls, given: str | Sequence[str]) -> "Selection":
        """Return the conditions in a text or in several, all of which must hold.

        Raises `ConfigurationError` that names the field.
        """
        texts = [given] if isinstance(given, str) else list(given)
        if sum(map(len, texts)) > LONGEST:
            raise ConfigurationError(f"where: the conditions are longer than {LONGEST} characters")
        return cls(tuple(one for text in texts for one in _conditions(text)))

    @property
    def with_cancelled(self) -> bool:
        """Whether cancelled runs are meant too: a condition is about the way in which runs ended.

        Others would bring back runs that somebody has stopped on purpose.
        """
        return any(one.field in _CANCELS for one in self.conditions)

    def selects(self, run: FailedRun) -> bool:
        """Return whether all conditions hold for a run."""
        return all(one.holds(run) for one in self.conditions)


def _conditions(text: str) -> list[_Condition]:
    found: list[_Condition] = []
    at = 0
    while at < len(text) or not found:
        part = _CONDITION.match(text, at)
        if part is None:
            rest = text[at:].strip()
            raise ConfigurationError(f"where: {rest!r} is not a condition; {_EXAMPLE}")
        found.append(_condition(part))
        at = part.end()
    return found


def _condition(part: re.Match[str]) -> _Condition:
    name, is_part = part["field"], part["sign"] == "~"
    quoted = part["quoted"]
    value = part["plain"].strip() if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
    if name not in FIELDS:
        raise ConfigurationError(f"where: there is no field {name!r}; use {', '.join(FIELDS)}")
    if not value:
        raise ConfigurationError(f"where: {name} has no value; {_EXAMPLE}")
    if name == "step":
        if is_part or not (value.isascii() and value.isdigit()):
            raise ConfigurationError("where: step takes a number, as in step=3")
        value = str(int(value))
    if name == "stop_reason" and not is_part:
        value = _stop_reason(value)
    return _Condition(name, value.casefold(), is_part)


def _stop_reason(value: str) -> str:
    reasons = {**{one.value: one for one in StopReason}, **_LIMITS}
    if value.casefold() not in reasons:
        known = ", ".join(one.value for one in StopReason if one is not StopReason.COMPLETED)
        raise ConfigurationError(f"where: {value!r} is not a stop reason; use {known}")
    return reasons[value.casefold()].value


def _value(run: FailedRun, name: str) -> str:
    return {
        "error": run.text,
        "code": run.cause.code or "",
        "tool": run.cause.tool or "",
        "model": run.model,
        "step": str(run.step),
        "stop_reason": run.stop_reason.value,
        "cause": run.cause.key,
        "agent": run.agent,
        "tenant": run.tenant or "",
    }[name]
