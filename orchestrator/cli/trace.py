"""A run as a terminal shows it: its trace of steps and tools, or its conversation as a chat."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import indent

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.cli.explain import AwaitedTool
from stepfleet.orchestrator.cli.fleet import with_fleet
from stepfleet.orchestrator.cli.terminal import (
    count,
    moment,
    print_json_line,
    screen,
    seconds,
    shown,
    shown_error,
    usd,
)
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.client.rendering import (
    ErrorBanner,
    RunView,
    UIMessage,
    UIRole,
    indicator,
)
from stepfleet.orchestrator.records.calls.answers import RunEnd
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run.facts import OriginKind, RunOrigin, end_state
from stepfleet.orchestrator.records.run.results import AgentRunResult, LostAttempt
from stepfleet.orchestrator.records.steps import SHORTENED, Handoff, StepResult

_LINE = 160
_NAME = 120
_ORIGINS = {
    OriginKind.FORK: "forked from",
    OriginKind.CHECKPOINT: "restored from a checkpoint of",
    OriginKind.RESULT: "given the result of",
}


def trace(
    result: AgentRunResult,
    inputs: Mapping[int, Sequence[Message]],
    *,
    full: bool,
    debug: bool = False,
    awaited: Iterable[AwaitedTool] = (),
) -> RenderableType:
    """Return the run's trace; texts are cut to a line each unless `full`.

    `debug` adds the tracebacks of the user's code that failed. `inputs` are its input messages, by
    the number of steps before.
    """
    limit = 0 if full else _LINE
    texts = {
        at: next((one.text for one in reversed(given) if one.is_user()), "")
        for at, given in inputs.items()
    }
    parts: list[RenderableType] = [_head(result)]
    for step in result.steps:
        parts += [_labelled("input", text, limit) for text in _taken(texts, step.step - 1)]
        parts.append(_step(step, limit, debug=debug))
        parts += [_handed(one, limit) for one in result.handoffs if one.step == step.step]
    parts += [_labelled("input", texts[at], limit) for at in sorted(texts)]
    parts += [_awaited(one) for one in awaited]
    if result.lost_attempts:
        parts.append(_lost(result.lost_attempts))
    if result.error:
        parts.append(_labelled("error", shown_error(result.error, limit), 0, "red"))
    elif result.last_error:
        text = shown_error(str(result.last_error), limit)
        parts.append(_labelled("last error", text, 0, "red"))
    if debug and result.outcome:
        parts += [_traceback(one.traceback) for one in result.outcome.broken]
    if result.output is not None:
        parts.append(_labelled("answer", result.output, limit, "green"))
    if result.shortened:
        parts.append(Text(f"the answer was {result.shortened}", style="yellow"))
    return Group(*parts)


def _head(result: AgentRunResult) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    state = result.lifecycle.value
    if result.stop_reason:
        state += f" ({result.stop_reason.value})"
    usage = result.usage
    used = (
        f"{result.steps_used} of {result.max_iterations} steps, "
        f"{count(usage.total_tokens, guessed=result.usage_estimated)} tokens "
        f"({count(usage.prompt_tokens)} prompt, {count(usage.completion_tokens)} completion), "
        f"{usd(result.cost_usd, guessed=result.is_estimate)}"
    )
    if result.usage_estimated:
        used += " (tokens are estimated where a server reports none)"
    if result.price_estimated:
        used += " (an estimate: no price is known for a model; see stepfleet costs --by model)"
    if result.below_usage.total_tokens or result.below_cost_usd:
        below = f"{count(result.below_usage.total_tokens)} tokens, {usd(result.below_cost_usd)}"
        used += f"; runs below: {below}; together {usd(result.total_cost_usd)}"
    if result.lost_cost_usd:
        used += f"; attempts that were not committed: {usd(result.lost_cost_usd)}"
    if usage.cached_calls:
        used += f", {count(usage.cached_calls)} cached (saved {usd(result.saved_usd)})"
    for label, value in (
        ("run", result.run_id),
        ("agent", shown(result.agent_name, 60)),
        ("state", state),
        ("origin", origin_text(result.origin)),
        ("batch", f"{result.batch_id}, line {shown(result.line_id)}" if result.batch_id else ""),
        ("tenant", result.tenant),
        ("parent", result.parent_agent_id),
        ("started", moment(result.start_time)),
        ("duration", seconds(result.duration_seconds) if result.end_time else ""),
        ("used", used),
    ):
        if value:
            table.add_row(Text(label, style="bold"), Text(value))
    return table


def origin_text(origin: RunOrigin | None) -> str:
    """Return the origin of a run in words; empty without one."""
    if origin is None:
        return ""
    text = f"{_ORIGINS[origin.kind]} {shown(origin.run_id)}"
    if origin.at:
        return f"{text}, after {'1 step' if origin.at == 1 else f'{count(origin.at)} steps'}"
    return text if origin.kind is OriginKind.RESULT else f"{text}, from its beginning"


def _taken(texts: dict[int, str], before: int) -> list[str]:
    """Take out the inputs after that many steps or fewer: a log may have been trimmed."""
    return [texts.pop(at) for at in sorted(texts) if at <= before]


def _labelled(label: str, text: str, limit: int, style: str = "") -> Text:
    line = Text(f"{label}: ", style="bold")
    return line.append(shown(text, limit), style=style)


def _step_head(step: StepResult) -> Text:
    spent = [seconds(step.duration_ms / 1000)]
    if step.usage and (step.usage.total_tokens or not step.cached):
        spent.append(f"{count(step.usage.total_tokens, guessed=step.usage_estimated)} tokens")
    if step.cost_usd:
        is_guess = step.price_estimated or step.usage_estimated
        spent.append(usd(step.cost_usd, guessed=is_guess))
    if step.finish_reason in SHORTENED:
        spent.append(SHORTENED[step.finish_reason])
    if step.cache and step.cache.hit:
        saved = f"{count(step.cache.saved_tokens)} tokens, {usd(step.cache.saved_usd)}"
        spent.append(f"cached (saved {saved})")
    if step.waited_seconds:
        why = shown(step.waited_for, _NAME) or "limits of the fleet"
        spent.append(f"waited {seconds(step.waited_seconds)} before, for {why}")
    head = Text(f"step {step.step}", style="bold cyan")
    agent = f" {shown(step.agent, _NAME)}:" if step.agent else ""
    head.append(f"{agent} {step.type.value}, {', '.join(spent)}", style="dim")
    return head


def _handed(handoff: Handoff, limit: int) -> Text:
    why = f": {shown(handoff.reason, limit)}" if handoff.reason else ""
    return Text(f"  handed over to {shown(handoff.to, _NAME)}{why}", style="magenta")


def _step(step: StepResult, limit: int, *, debug: bool) -> RenderableType:
    lines: list[RenderableType] = [_step_head(step)]
    if step.fallback:
        lines.append(Text("  " + shown(str(step.fallback), limit), style="yellow"))
    if step.thought:
        lines.append(Text("  " + shown(step.thought, limit)))
    for call in step.tool_calls:
        lines.append(_call(call, limit))
        if debug and call.error and call.error.traceback:
            lines.append(_traceback(call.error.traceback))
    in_calls = {call.error.message for call in step.tool_calls if call.error}
    for error in step.problems:
        if error.message in in_calls:
            continue
        words = f"  {error.type.value} ({error.code}): {shown_error(error.message, limit)}"
        lines.append(Text(words, style="red"))
        if debug and error.traceback:
            lines.append(_traceback(error.traceback))
    return Group(*lines)


def _traceback(text: str | None) -> Text:
    return Text(indent(shown(text or ""), "    "), style="dim")


def _call(call: ToolCallRecord, limit: int) -> Text:
    line = Text(f"  {shown(call.tool_name, 60)}({shown(call.arguments, limit or 10_000)}) → ")
    if call.error:
        line.append(f"{call.error.code}: {shown_error(call.error.message, limit)}", style="red")
    else:
        line.append(shown(call.result, limit))
    if call.duration_ms:  # none is known of a call that waited
        line.append(f"  {call.duration_ms:.0f} ms", style="dim")
    if call.repeated:
        line.append("  repeated: an earlier attempt may have done it", style="yellow")
    if call.run is not None:
        line.append(f"\n    {_of_run(call.run)}", style="dim")
    if call.decision is not None:
        line.append(f"\n    {shown(str(call.decision), limit)}", style="dim")
    return line


def _of_run(run: RunEnd) -> str:
    steps = "1 step" if run.steps == 1 else f"{count(run.steps)} steps"
    below = f", runs below {usd(run.below_cost_usd)}" if run.below_cost_usd else ""
    spent = f"{_end_of(run)}, {steps}, {usd(run.cost_usd)}{below}"
    return f"run {run.run_id} of {shown(run.agent, 60)}: {spent}"


def _end_of(run: RunEnd) -> str:
    """Return how the run has ended, in the words of a list of runs."""
    try:
        state = end_state(StopReason(run.stop_reason)).value
    except ValueError:  # without one, or of a later version
        return shown(run.status, _NAME)
    return state if state == run.stop_reason else f"{state} ({run.stop_reason})"


def _awaited(one: AwaitedTool) -> Text:
    return Text(f"waits for {one.text}", style="" if one.served else "yellow")


def _lost(attempts: Iterable[LostAttempt]) -> RenderableType:
    lines = []
    for one in attempts:
        cost = usd(one.cost_usd) if one.cost_usd is not None else "cost unknown"
        paid = f", a call may have been paid for ({cost})" if one.ambiguous else ""
        why = f": {shown(one.reason, _LINE)}" if one.reason else ""
        lines.append(
            Text(
                f"not committed: step {one.step}, {one.kind}, {seconds(one.seconds)}{paid}{why}",
                style="yellow",
            )
        )
    return Group(*lines)


_ROLE_STYLES = {UIRole.USER: "bold", UIRole.TOOL: "cyan", UIRole.STATUS: "dim"}


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
    line = Text(f"{message.role.value}: ", style=_ROLE_STYLES.get(message.role, "bold green"))
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
