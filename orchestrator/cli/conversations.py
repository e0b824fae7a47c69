"""A run's conversation as a terminal shows it: what was said, tools in short, errors. Pure."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from stepfleet.orchestrator.cli.words import count, seconds, shown
from stepfleet.orchestrator.rendering import ErrorBanner, RunView, UIMessage, UIRole
from stepfleet.orchestrator.rendering.rules import indicator

_LINE = 160
_STYLES = {UIRole.USER: "bold", UIRole.TOOL: "cyan", UIRole.STATUS: "dim"}


def conversation(messages: Iterable[UIMessage], *, full: bool) -> RenderableType:
    """Return the messages, one below the other; tools' results are cut to a line unless `full`."""
    return Group(*(_message(one, full=full) for one in messages))


def whole_view(view: RunView, *, full: bool) -> RenderableType:
    """Return a run's conversation, and below it what it stopped for."""
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
