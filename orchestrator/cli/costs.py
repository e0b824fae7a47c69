"""`stepfleet costs`: sums of model calls as a table, CSV or JSON, and single calls as lines."""

import csv
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Literal

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.fleet import with_fleet
from stepfleet.orchestrator.cli.terminal import (
    Column,
    Rows,
    count,
    notice,
    print_json,
    print_json_line,
    screen,
    shown,
    text_out,
    usd,
)
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.ledger import CostLine, CostRow, Costs

CostFormat = Literal["table", "csv", "json", "jsonl"]
_NAME = 60
_NO_VALUE = "(none)"
_PAGE = 200
"""Calls of a table: there may be more than memory holds."""
_SUMS = tuple(
    Column(name, number=True)
    for name in ("calls", "input", "cached", "output", "cost", "of it lost", "may be paid", "saved")
)
_CALL = (
    Column("run", key=True),
    Column("agent", key=True),
    Column("step", number=True),
    Column("model"),
    Column("status"),
    *_SUMS[1:5],
    Column("saved", number=True),
    Column("time (UTC)"),
)


def costs(
    *,
    by: Annotated[
        str,
        typer.Option(
            "--by", metavar="KEYS", help="day, tenant, batch, agent, model, lane, status."
        ),
    ] = "",
    since: Annotated[
        str | None, typer.Option("--since", metavar="DAY", help="2026-11-22, or 7d ago (UTC).")
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="DAY", help="The last day, like --since.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Of this tenant; '': of none.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", "-b", metavar="ID", help="Of this batch.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option("--agent", metavar="NAME", help="Of this agent.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="Of this model.")
    ] = None,
    lane: Annotated[
        str | None,
        typer.Option("--lane", metavar="LANE", help="Of this tier: standard, flex, priority, ..."),
    ] = None,
    status: Annotated[
        str | None,
        typer.Option("--status", metavar="STATUS", help="committed, lost, ambiguous or cached."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="The calls of this run, or line, one by one."),
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Single calls, of runs that are kept (CSV, JSON).")
    ] = False,
    output_format: Annotated[
        Literal["table", "csv", "json", "jsonl"], typer.Option("--format", help="Of the output.")
    ] = "table",
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Show what model calls have cost: also those whose answers were lost, and what was saved.

    The sums stay when their runs are gone. Lines that may have been paid are shown apart.
    """
    today = datetime.now(UTC).date()
    which: Any = {"tenant": tenant, "batch": batch, "agent": agent, "model": model}
    days = {
        "since": day_given(since, "--since", today),
        "until": day_given(until, "--until", today),
    }
    which |= {"lane": lane, "status": status, **days}
    if lines or run:
        with_fleet(data, lambda fleet: print_lines(fleet, run, which, output_format))
        return
    print_costs(with_fleet(data, lambda fleet: fleet.costs(by, **which)), output_format)


def day_given(text: str | None, option: str, today: date) -> date | None:
    """Return a day: `2026-11-22`, or `7d` ago. Raises `ConfigurationError`. Pure."""
    if text is None:
        return None
    if text.endswith("d") and text[:-1].isascii() and text[:-1].isdigit() and len(text) < 6:  # noqa: PLR2004 - 9999 days
        return today - timedelta(days=int(text[:-1]))
    try:
        return date.fromisoformat(text)
    except ValueError:
        msg = f"{option} {ascii(text)[:40]}: write a day (2026-11-22) or days ago (7d)"
        raise ConfigurationError(msg) from None


async def print_lines(fleet: AsyncFleet, run_id: str | None, which: Any, form: CostFormat) -> None:
    """Print single calls while they are read, run by run: CSV, or a line of JSON for each.

    `run_id` may be the id of a line, as `show` takes it. A table is for a terminal only:
    elsewhere it is CSV.
    """
    if run_id is not None:
        run_id = await fleet.runs.find(run_id, which.get("batch"))
        tree = await fleet.runs.tree(run_id, limit=0)
        if tree.left_out:
            notice(
                "The calls of this run only: those of runs below it are not among them "
                f"(stepfleet show {run_id} lists them, with their costs)."
            )
    lines = fleet.cost_lines(run_id, **which)
    if form == "table" and sys.stdout.isatty():
        await _print_tables(lines, with_run=run_id is None)
    elif form in ("table", "csv"):
        writer = csv.writer(text_out(), lineterminator="\n")
        names = list(CostLine.model_fields)
        writer.writerow(names)
        async for line in lines:
            data = line.model_dump(mode="json")
            writer.writerow([_cell(data[name]) for name in names])
    else:
        async for line in lines:
            print_json_line(line.to_dict())


async def _print_tables(lines: AsyncIterator[CostLine], *, with_run: bool) -> None:
    page: list[CostLine] = []
    is_any = False
    async for line in lines:
        page.append(line)
        if len(page) == _PAGE:
            screen().print(calls_picture(page, with_run=with_run))
            is_any, page = True, []
    if page:
        screen().print(calls_picture(page, with_run=with_run))
    elif not is_any:
        screen().print("no calls")


def calls_picture(lines: Sequence[CostLine], *, with_run: bool) -> RenderableType:
    """Return a row for each model call."""
    return Rows(
        _CALL,
        [
            (
                shown(one.run_id) if with_run else "",
                shown(one.agent, _NAME),
                count(one.step),
                shown(one.model or "", _NAME),
                one.state.value,
                count(one.input_tokens),
                count(one.cached_tokens) if one.cached_tokens else "",
                count(one.output_tokens),
                "not known" if one.usd is None else usd(one.usd, guessed=one.price_estimated),
                usd(one.saved_usd) if one.saved_usd else "",
                f"{one.time:%m-%d %H:%M:%S}" if one.time else "",
            )
            for one in lines
        ],
    )


def print_costs(found: Costs, form: CostFormat) -> None:
    """Print sums in that form."""
    if form == "json":
        print_json(found.to_dict())
    elif form == "jsonl":
        for row in found.rows or (found.total,):
            data = row.to_dict()
            print_json_line({**data.pop("group"), **data})
    elif form == "csv":
        names = [name for name in CostRow.model_fields if name != "group"]
        writer = csv.writer(text_out(), lineterminator="\n")
        writer.writerow([*found.by, *names])
        for row in found.rows or (found.total,):
            data = row.to_dict()
            cells = [row.group.get(key, "") for key in found.by]
            writer.writerow([_cell(one) for one in [*cells, *(data[name] for name in names)]])
    else:
        screen().print(costs_picture(found))
    if form != "table" and found.unpriced_models:
        notice(_unpriced(found.unpriced_models))


def costs_picture(costs: Costs) -> RenderableType:
    """Return the output for a terminal: a row for each group, the total, and what is not sure."""
    rows = [
        [*(shown(row.group[key] or _NO_VALUE, _NAME) for key in costs.by), *_cells(row)]
        for row in costs.rows
    ]
    total = costs.total
    names = ["total", *([""] * (len(costs.by) - 1))] if costs.by else []
    columns = (*(Column(key, key=True) for key in costs.by), *_SUMS)
    table = Rows(columns, [*rows, [*names, *_cells(total)]], total=True)
    parts: list[RenderableType] = [Text(f"{costs.since} to {costs.until} (UTC)"), table]
    if total.ambiguous_calls:
        text = (
            f"{count(total.ambiguous_calls)} more calls may have been paid: their answers "
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
    calls = count(row.calls + row.cached_calls)
    cached = count(row.cached_tokens) if row.cached_tokens else ""
    beside = (row.lost_usd, row.ambiguous_usd, row.saved_usd)
    return [
        *(calls, count(row.input_tokens), cached, count(row.output_tokens)),
        usd(row.usd, guessed=row.default_priced_calls > 0),
        *(usd(one) if one else "" for one in beside),
    ]


def _cell(value: Any) -> Any:
    """Return a value as a spreadsheet takes it: no text of others begins a formula."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return "" if value is None else value
