"""`stepfleet audit`: who changed what, from where."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.fleet import with_fleet
from stepfleet.orchestrator.cli.terminal import moment, print_json_line, print_text, shown
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.records.audit import AuditEntry
from stepfleet.orchestrator.records.text.validation import duration

LONGEST_LINE = 1_000


def audit(
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="2026-11-22, 2026-11-22T08:30Z, or 12h ago."),
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", metavar="NAME", help="Only what this user has changed.")
    ] = None,
    action: Annotated[
        str | None, typer.Option("--action", metavar="NAME", help="Only cancel, retry, set, ...")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=10_000, help="The newest so many entries.")
    ] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new entries until Ctrl-C.")
    ] = False,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Show who changed what, from where: in Flower, by commands, and by code; the newest last."""
    begin = since_given(since, datetime.now(UTC))

    async def print_all(fleet: AsyncFleet) -> None:
        found = fleet.audit(limit=limit, since=begin, user=user, action=action, follow=follow)
        async for entry in found:
            if json:
                print_json_line(entry.to_dict())
            else:
                print_text(line_of(entry))
            await asyncio.sleep(0)

    with_fleet(data, print_all, waits=follow)


def since_given(text: str | None, now: datetime) -> datetime | str | None:
    """Return the time that `12h` or `7d` means; others as they are. Pure."""
    ago = None if text is None else duration(text)
    return text if ago is None else now - timedelta(seconds=ago)


def line_of(entry: AuditEntry) -> str:
    """Return an entry as a line: when, who, by what, what, and how it ended. Pure."""
    who = f"{entry.user}@{entry.host}" if entry.host else entry.user
    by = f" ({entry.source})" if entry.source else ""
    text = f"{who}{by}: {entry.action} {entry.target}: {entry.detail}"
    return f"{moment(datetime.fromisoformat(entry.at))}  {shown(text, LONGEST_LINE)}"
