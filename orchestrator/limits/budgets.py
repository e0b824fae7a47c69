"""Budgets: what calls spend of them, and the one that a call would exceed. Pure."""

import shlex
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from stepfleet.orchestrator.records.outcome import (
    ContinuationDecision,
    ContinuationEvaluation,
    StopReason,
)
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.usage import NANO, UsageStats, nano_usd

KINDS = {"u": "usd", "k": "tokens", "n": "calls", "a": "active_seconds"}
FIELDS = {
    **KINDS,
    **{f"{kind}d": f"{field}_per_day" for kind, field in KINDS.items()},
}
"""Fields of a limit by the codes of the script: a kind, with `d` after it by days."""
SCALES = {"u": NANO, "k": 1, "n": 1, "a": 1000}
"""Whole numbers that make up a unit: USD are counted in billionths, seconds in thousandths."""
STOP: Literal["stop"] = "stop"
HOLD: Literal["hold"] = "hold"
MOST_ESTIMATED = 10**13
"""The script keeps reserved numbers in JSON, which has fourteen digits there."""


@dataclass(frozen=True, slots=True)
class Spending:
    """What calls take of budgets: billionths of a USD, tokens, calls, milliseconds of steps."""

    nano: int = 0
    tokens: int = 0
    calls: int = 0
    active_ms: int = 0

    def stored(self) -> dict[str, int]:
        """Return the numbers as the script reads them; those that are 0 are left out."""
        given = (self.nano, self.tokens, self.calls, self.active_ms)
        return {kind: one for kind, one in zip(KINDS, given, strict=True) if one}

    def __add__(self, other: "Spending") -> "Spending":
        """Return the sum."""
        return Spending(
            self.nano + other.nano,
            self.tokens + other.tokens,
            self.calls + other.calls,
            self.active_ms + other.active_ms,
        )


NOTHING = Spending()


def spending_of(usage: UsageStats, usd: float, seconds: float = 0.0) -> Spending:
    """Return what calls with that usage and price, in a step of `seconds`, have spent."""
    tokens = usage.prompt_tokens + usage.completion_tokens
    return Spending(nano_usd(usd), tokens, usage.llm_calls, round(seconds * 1000))


def estimated(prompt: int, output: int, usd: float, seconds: float) -> Spending:
    """Return the expected spending of a call."""
    parts = (nano_usd(usd), prompt + output, 1, round(seconds * 1000))
    return Spending(*(min(one, MOST_ESTIMATED) for one in parts))


def spent_by(state: AgentState) -> Spending:
    """Return what a run and those below it have spent; its time is that of its own execution."""
    seconds = state.info.cumulative_execution_seconds
    usage = state.session_usage + state.session_below_usage
    spent = spending_of(usage, state.session_cost_usd + state.session_below_cost_usd, seconds)
    lost = state.session_lost
    return spent + Spending(nano_usd(lost.cost_usd), lost.tokens, lost.calls)


@dataclass(frozen=True, slots=True)
class Exhausted:
    """A budget with too little left for a call: the limit's name and field, and the numbers."""

    name: str
    field: str
    budget: Decimal
    spent: Decimal
    wanted: Decimal

    @classmethod
    def of(cls, name: str, code: str, *numbers: int) -> "Exhausted":
        """Return it from the script's code of the field, and budget, spent, wanted as integers."""
        scale = SCALES[code[0]]
        return cls(name, FIELDS[code], *(Decimal(one) / scale for one in numbers))

    @classmethod
    def loaded(cls, word: str) -> "Exhausted | None":
        """Return what the script's word `over <code> <numbers> <name>` says; None for others."""
        parts = word.split(" ", 5)
        if parts[0] != "over":
            return None
        return cls.of(parts[5], parts[1], *map(int, parts[2:5]))

    def evaluation(self) -> ContinuationEvaluation:
        """Return the evaluation that ends a run."""
        unit = " USD" if self.field.startswith("usd") else ""
        reason = (
            f"{self.field.replace('_', ' ')} of {self.name}: {shown(self.spent)}{unit} of the "
            f"budget of {shown(self.budget)}{unit} are spent, and the next call is expected to "
            f"take {shown(self.wanted)}{unit}; raise it ({raising(self.name, self.field)}) "
            "and retry the run"
        )
        numbers = {"budget": self.budget, "spent": self.spent, "estimate": self.wanted}
        return ContinuationEvaluation(
            criterion="FleetBudget",
            decision=ContinuationDecision.FORBID_CONTINUATION,
            reason=reason,
            context={
                "limit": self.name,
                "field": self.field,
                **{key: float(one) for key, one in numbers.items()},
            },
            stop_reason=StopReason.GUARD,
        )


def raising(name: str, field: str) -> str:
    """Return the command that raises a budget."""
    return f"stepfleet limits set {shlex.quote(name)} {field}=..."


def shown(number: Decimal) -> str:
    """Return an exact number without an exponent or zeros at its end."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
