"""Limits of the fleet and their use, as a terminal shows them."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.cli.terminal.format import count, seconds, shown
from stepfleet.orchestrator.limits.budgets import shown as number
from stepfleet.orchestrator.limits.limit import Limit
from stepfleet.orchestrator.store.limits import BudgetUse, LimitUse, raised_by

_NAME = 60
NONE = "no limits: stepfleet limits set openai:gpt-4o-mini requests_per_minute=3000"


def words(limit: Limit | None) -> str:
    """Return a limit's fields in a line."""
    fields = limit.model_dump(exclude_unset=True) if limit else {}
    parts = [
        f"{name.replace('_', ' ')} {value if isinstance(value, str) else f'{value:,g}'}"
        for name, value in fields.items()
        if name != "learn"
    ]
    if fields.get("learn") is False:
        parts.append("learns nothing")
    return ", ".join(parts)


def _budget(name: str, use: BudgetUse) -> str:
    """Return in a line what there is of a budget."""
    held = f", {number(use.reserved)} reserved" if use.reserved else ""
    left = f"over by {number(use.over)}" if use.over else f"{number(use.left)} left"
    return (
        f"{use.field.replace('_', ' ')} of {shown(name, _NAME)}: {number(use.spent)} of "
        f"{number(use.budget)} spent{held}, {left}"
    )


def _learned(one: LimitUse) -> str:
    rates = (f"{name.replace('_', ' ')} {rate:,g}" for name, rate in one.learned.items())
    return f"learned: {', '.join(rates)}" if one.learned else ""


def picture(found: list[LimitUse]) -> RenderableType:
    """Return a row per limit, and what the lines wait for."""
    if not found:
        return Text(NONE, style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("limit", "allows"):
        table.add_column(heading, overflow="fold")
    for heading in ("in flight", "waiting", "refused"):
        table.add_column(heading, justify="right", no_wrap=True)
    notes = []
    for one in found:
        style = "" if one.limit or one.learned else "dim"
        counts = (one.in_flight, one.waiting, one.refused)
        table.add_row(
            Text(shown(one.name, _NAME), style=style),
            Text("; ".join(filter(None, (words(one.limit), _learned(one))))),
            *(Text(count(number)) for number in counts),
        )
        if one.cool_seconds:
            text = (
                f"{shown(one.name, _NAME)}: no calls for {seconds(one.cool_seconds)}, after a 429"
            )
            notes.append(Text(text, style="yellow"))
        notes += [Text(_budget(one.name, budget)) for budget in one.budgets]
        if one.waits_for:
            runs = "1 run waits" if one.waiting == 1 else f"{count(one.waiting)} runs wait"
            text = f"{runs} for {shown(one.waits_for, 120)}{shown(raised_by(one.waits_for), 200)}"
            notes.append(Text(text))
    return Group(table, *notes)
