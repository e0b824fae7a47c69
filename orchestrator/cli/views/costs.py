"""`stepfleet costs`: sums of model calls as a table, CSV or JSON, and single calls as lines."""

import csv
import sys
from collections.abc import Sequence
from datetime import date, timedelta
from decimal import Decimal
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.cli.terminal.format import count, shown
from stepfleet.orchestrator.cli.terminal.output import (
    notice,
    print_json,
    print_json_line,
    screen,
)
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.ledger import CostLine, CostRow, Costs

CostFormat = Literal["table", "csv", "json", "jsonl"]
_NAME = 40
_NO_VALUE = "(none)"
_CENTS = Decimal("0.01")


def day_given(text: str | None, option: str, today: date) -> date | None:
    """Return a day: `2026-11-22`, or `7d` ago. Raises `ConfigurationError`. Pure."""
    if text is None:
        return None
    if text.endswith("d") and text[:-1].isascii() and text[:-1].isdigit() and len(text) < 6:  # noqa: PLR2004 - 9999 days
        return today - timedelta(days=int(text[:-1]))
    try:
        return date.fromisoformat(text)
    except ValueError:
        msg = f"{option} {ascii(text)[:40]}: write a day, as 2026-11-22, or days ago, as 7d"
        raise ConfigurationError(msg) from None


async def print_lines(fleet: AsyncFleet, run_id: str | None, which: Any, form: CostFormat) -> None:
    """Print single calls while they are read, run by run: CSV, or a line of JSON for each."""
    if form in ("table", "csv"):
        writer = csv.writer(sys.stdout, lineterminator="\n")
        names = list(CostLine.model_fields)
        writer.writerow(names)
        async for line in fleet.cost_lines(run_id, **which):
            data = line.model_dump(mode="json")
            writer.writerow([_cell(data[name]) for name in names])
        return
    async for line in fleet.cost_lines(run_id, **which):
        print_json_line(line.to_dict())


def print_costs(costs: Costs, form: CostFormat) -> None:
    """Print sums in that form."""
    if form == "json":
        print_json(costs.to_dict())
    elif form == "jsonl":
        for row in costs.rows or (costs.total,):
            data = row.to_dict()
            print_json_line({**data.pop("group"), **data})
    elif form == "csv":
        names = [name for name in CostRow.model_fields if name != "group"]
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([*costs.by, *names])
        for row in costs.rows or (costs.total,):
            data = row.to_dict()
            cells = [row.group.get(key, "") for key in costs.by]
            writer.writerow([_cell(one) for one in [*cells, *(data[name] for name in names)]])
    else:
        screen().print(picture(costs))
    if form != "table" and costs.unpriced_models:
        notice(_unpriced(costs.unpriced_models))


def picture(costs: Costs) -> RenderableType:
    """Return what a terminal shows: a row for each group, the total, and what is not sure."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for key in costs.by:
        table.add_column(key)
    for name in ("calls", "input", "cached", "output", "USD", "of it lost", "may be paid", "saved"):
        table.add_column(name, justify="right")
    for row in costs.rows:
        names = [shown(row.group[key] or _NO_VALUE, _NAME) for key in costs.by]
        table.add_row(*names, *_cells(row))
    total = costs.total
    names = ["total", *([""] * (len(costs.by) - 1))] if costs.by else []
    table.add_row(*names, *_cells(total), style="bold")
    parts: list[RenderableType] = [Text(f"{costs.since} to {costs.until} (UTC)"), table]
    if total.ambiguous_calls:
        text = (
            f"{count(total.ambiguous_calls)} calls may have been paid beside these: their answers "
            "were lost, and their price is an estimate"
        )
        if total.unpriced_calls:
            text += f"; {count(total.unpriced_calls)} of them have no price"
        parts.append(Text(text, style="yellow"))
    if total.estimated_calls:
        text = f"{count(total.estimated_calls)} calls without usage from their server were counted"
        parts.append(Text(f"{text} here", style="yellow"))
    if costs.unpriced_models:
        parts.append(Text(_unpriced(costs.unpriced_models), style="yellow"))
    return Group(*parts)


def _unpriced(models: Sequence[str]) -> str:
    names = ", ".join(shown(one or _NO_VALUE, _NAME) for one in models[:5])
    more = f" and {len(models) - 5} more" if len(models) > 5 else ""  # noqa: PLR2004 - a line
    return f"no price is known for {names}{more}: the default applies; see docs/costs.md"


def _cells(row: CostRow) -> list[str]:
    tokens = (row.input_tokens, row.cached_tokens, row.output_tokens)
    amounts = (row.lost_usd, row.ambiguous_usd, row.saved_usd)
    return [
        count(row.calls + row.cached_calls),
        *map(count, tokens),
        _usd(row.usd),
        *(_usd(one) if one else "" for one in amounts),
    ]


def _usd(amount: Decimal) -> str:
    """Return an amount: cents from a dollar on, below it all digits."""
    if abs(amount) >= 1:
        return f"{amount.quantize(_CENTS):,}"
    return f"{amount.normalize():f}"


def _cell(value: Any) -> Any:
    """Return a value as a spreadsheet takes it: no text of others begins a formula."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return "" if value is None else value
