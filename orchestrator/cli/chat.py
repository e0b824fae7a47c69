"""A run's conversation as a terminal shows it: messages, tools in short, errors."""

from collections.abc import Iterable
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from stepfleet.orchestrator.cli.fleet import with_fleet
from stepfleet.orchestrator.cli.terminal import count, print_json_line, screen, seconds, shown
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.client.rendering import (
    ErrorBanner,
    RunView,
    UIMessage,
    UIRole,
    indicator,
)

_LINE = 160
_STYLES = {UIRole.USER: "bold", UIRole.TOOL: "cyan", UIRole.STATUS: "dim"}


def conversation(messages: Iterable[UIMessage], *, full: bool) -> RenderableType:
    """Return the messages, one below the other; tools' results are cut to a line unless `full`."""
    return Group(*(_message(one, full=full) for one in messages))


def whole_view(view: RunView, *, full: bool) -> RenderableType:
    """Return a run's conversation, and below it why it stopped."""
    parts = [conversation(view.messages, full=full)]
    if view.banner:
        parts.append(_banner(view.banner))
    if view.stop_reason:
        by = f", by {view.continuation.resolved_by}" if view.continuation else ""
        parts.append(Text(f"stopped: {view.stop_reason.value}{by}", style="dim"))
    return Group(*parts)


def _message(message: UIMessage, *, full: bool) -> Text:
    if message.is_error:
        return Text(f"error: {shown(message.content, 0 if full else _LINE)}", style="red")
    line = Text(f"{message.role.value}: ", style=_STYLES.get(message.role, "bold green"))
    if message.role is UIRole.TOOL:
        return _tool(message, line, full=full)
    line.append(shown(message.content), style="dim" if message.is_status else "")
    if message.metadata and message.metadata.tool_calls and not message.is_status:
        line.append(f"\n  calls {shown(indicator(message.metadata.tool_calls), _LINE)}", "dim")
    return line.append(_spent(message), style="dim")


def _tool(message: UIMessage, line: Text, *, full: bool) -> Text:
    known = message.metadata
    named = indicator(known.tool_calls) if known and known.tool_calls else ""
    failed = known is not None and known.tool_error is not None
    line.append(f"{shown(named, _LINE)} → ", style="cyan")
    line.append(shown(message.content, 0 if full else _LINE), style="red" if failed else "")
    if known and known.tool_duration_ms is not None:
        line.append(f"  {known.tool_duration_ms:.0f} ms", style="dim")
    return line.append(_spent(message), style="dim")


def _spent(message: UIMessage) -> str:
    known = message.metadata
    if known is None or known.step_duration_ms is None:
        return ""
    tokens = f", {count(known.usage.total_tokens)} tokens" if known.usage else ""
    return f"  (step {known.step}: {seconds(known.step_duration_ms / 1000)}{tokens})"


def _banner(banner: ErrorBanner) -> Text:
    where = "" if banner.step is None else f" in step {banner.step}"
    kind = f" ({banner.type}, {banner.code})" if banner.type else ""
    return Text(f"failed{where}{kind}: {shown(banner.message)}", style="bold red")


def follow_conversation(
    named: str, batch: str | None, data: Path, *, json: bool, full: bool
) -> None:
    """Print a run's conversation as it grows, until the run has ended.

    With `json`, each line is the list of all messages at that moment.
    """

    async def follow(fleet: AsyncFleet) -> None:
        run_id = await fleet.runs.find(named, batch)
        windows = fleet.runs.display(run_id, continuation=True)
        if json:
            async for messages in windows:
                print_json_line([message.to_dict() for message in messages])
            return
        with Live(console=screen(), auto_refresh=False, transient=True) as window:
            async for messages in windows:
                window.update(conversation(messages, full=full), refresh=True)
        screen().print(whole_view(await fleet.runs.view(run_id), full=full))

    with_fleet(data, follow, waits=True)
