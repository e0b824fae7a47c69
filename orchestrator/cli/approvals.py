"""Commands for people: the approvals that wait, and the decisions."""

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.fleet import with_fleet
from stepfleet.orchestrator.cli.inputs import confirm
from stepfleet.orchestrator.cli.options import data_option
from stepfleet.orchestrator.cli.terminal import (
    count,
    moment,
    print_either,
    print_json,
    screen,
    shown,
)
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.calls.answers import Ask, Decided

Run = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN[:CALL]]",
        help="A run id, or a line's id in --batch or a new batch; with the call if it has several.",
    ),
]
Batch = Annotated[
    str | None,
    typer.Option("--batch", "-b", help="All calls of this batch; with RUN the batch of that line."),
]
Agent = Annotated[str | None, typer.Option("--agent", help="Only calls of runs of this agent.")]
Tool = Annotated[str | None, typer.Option("--tool", help="Only calls of this tool.")]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Only runs of this tenant.")]
SameGroup = Annotated[
    str | None, typer.Option("--group", help="Only these equal calls, as `approvals` lists them.")
]
Key = Annotated[
    str | None, typer.Option("--key", help="Only this call, as `approvals --json` lists it.")
]
By = Annotated[str, typer.Option("--by", help="Who decides; you by default.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Decide many calls without a question.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; the model reads it.")]
_INDEX = re.compile("[0-9]{1,9}")
_LONGEST = 70
_GROUPS = 50
_RUNS = 3
"""Runs with the same question that are named."""
_ID = 200
_LINE = 25
"""Characters of a line's id: with its batch it fits 80 columns."""


def approvals(
    batch: Annotated[
        str | None, typer.Option("--batch", "-b", help="Only calls of this batch.")
    ] = None,
    agent: Agent = None,
    tool: Tool = None,
    tenant: Tenant = None,
    group: SameGroup = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """List the calls and questions that wait for a person.

    Equal ones are together, the oldest first.
    """
    which = _given(batch=batch, agent=agent, tool=tool, tenant=tenant, group=group)
    waiting = with_fleet(data, partial(_waiting, which))
    if json:
        print_json([{**one.to_dict(), "group": one.group} for one in waiting])
    else:  # no line is broken or cut: the commands are copied
        screen().print(waiting_picture(waiting), soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionOptions:
    """Which calls are decided, by whom and why."""

    reason: Reason = ""
    batch: Batch = None
    agent: Agent = None
    tool: Tool = None
    tenant: Tenant = None
    group: SameGroup = None
    key: Key = None
    by: By = ""
    yes: Yes = False
    json: options.Json = False
    data: options.Data = options.DATA_FOLDER

    @property
    def which(self) -> dict[str, Any]:
        """The conditions that are given, as `Fleet.decide` takes them."""
        names = ("batch", "agent", "tool", "tenant", "group", "key")
        return _given(**{name: getattr(self, name) for name in names})


def decide(
    run: Run = None,
    *,
    approve: Annotated[bool, typer.Option("--approve", help="The call is made.")] = False,
    deny: Annotated[
        bool, typer.Option("--deny", help="The call is not made; the model reads the reason.")
    ] = False,
    answer: Annotated[
        str | None,
        typer.Option("--answer", metavar="TEXT", help="Answer RUN's question; - reads stdin."),
    ] = None,
    given: DecisionOptions,
) -> int:
    """Approve or deny calls that wait, or answer a question: RUN's, or all that options name.

    One of --approve, --deny and --answer says how. Exit code 1: nothing was decided.
    """
    _check_how(run, answer, given.reason, ways=approve + deny + (answer is not None))
    # A question can be denied, and not approved.
    kind = "approval" if approve else None if deny else "question"
    which = given.which | _given(kind=kind)
    how: dict[str, Any] = {"approve": not deny, "reason": given.reason}
    how |= {"by": given.by} if given.by else {}
    if answer is not None:
        how["answer"] = sys.stdin.read().strip() if answer == "-" else answer
    word = "approved" if approve else "denied" if deny else "answered"
    if run is None:
        if not which.keys() - {"kind"}:
            raise ConfigurationError("name a run, or which calls: --batch, --tool, --group ...")
        if not given.yes:
            how["before"] = _confirmed(which, word, given.data)

    async def send(fleet: AsyncFleet) -> Decided:
        if run is None:
            return await fleet.decide(**which, **how)
        run_id, call = await _found(fleet, run, given.batch)
        one: dict[str, Any] = {} if call is None else {"call": call}
        return await fleet.decide(run_id, **which, **how, **one)

    decided = with_fleet(given.data, send)
    print_either(decided, lambda one: _words(one, word), json=given.json, as_data=Decided.to_dict)
    return 0 if decided.applied else 1


def _check_how(run: str | None, answer: str | None, reason: str, *, ways: int) -> None:
    """Raise `ConfigurationError` unless one way to decide is given, with what belongs to it."""
    if ways != 1:
        words = "more than one is given" if ways else "none is given"
        raise ConfigurationError(f"give one of --approve, --deny and --answer TEXT: {words}")
    if answer is not None and run is None:
        raise ConfigurationError("--answer is for one question: give its RUN")
    if answer is not None and reason:
        raise ConfigurationError("--reason is for --approve and --deny: say it in --answer")


def approve(run: Run = None, *, given: DecisionOptions) -> int:
    """Approve a call that waits, or all that the options name."""
    return decide(run, approve=True, given=given)


def deny(run: Run = None, *, given: DecisionOptions) -> int:
    """Deny a call that waits, or all that the options name."""
    return decide(run, deny=True, given=given)


def answer(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[:CALL]",
            help="The run that asks, or its line's id; with the call if several.",
        ),
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The answer; - reads stdin.")],
    batch: options.BatchOfLine = None,
    key: Key = None,
    by: By = "",
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Answer the question that a run asks by its tool ask_person."""
    given = DecisionOptions(batch=batch, key=key, by=by, json=json, data=data)
    return decide(run, answer=text, given=given)


def _given(**conditions: str | None) -> dict[str, Any]:
    """Return the conditions that are given."""
    return {name: value for name, value in conditions.items() if value is not None}


async def _waiting(which: dict[str, Any], fleet: AsyncFleet) -> list[Ask]:
    return [one async for one in fleet.approvals.all(**which)]


def _confirmed(which: dict[str, str], word: str, data: Path) -> datetime:
    """Ask once, and return when the newest of the calls began to wait that the question counts."""
    found = with_fleet(data, partial(_waiting, which))
    if not found:
        raise ConfigurationError("no such call waits; `stepfleet approvals` lists what does")
    groups = ", ".join(f"{same[0].tool} ({count(len(same))})" for same in _equal(found)[:5])
    question = f"{count(len(found))} calls, {groups}, will be {word}. Continue?"
    confirm(question, "add --yes", word)
    return max(one.since for one in found)


async def _found(fleet: AsyncFleet, named: str, batch: str | None) -> tuple[str, int | None]:
    """Return the run that is named by its id or its line's, and the call's index if it is named.

    A line's id may itself end as the place of a call.
    """
    name, call = call_of(named)
    try:
        return await fleet.runs.find(name, batch), call
    except ConfigurationError:
        if call is None:
            raise
        return await fleet.runs.find(named, batch), None


def call_of(run: str) -> tuple[str, int | None]:
    """Return the run, and the call's index if it is named: `RUN:CALL`."""
    run_id, colon, call = run.rpartition(":")
    return (run_id, int(call)) if _INDEX.fullmatch(call) and colon else (run, None)


def _words(decided: Decided, word: str) -> str:
    if not decided.applied and not decided.late:
        return "Nothing that waits matches: `stepfleet approvals` lists what waits"
    calls = "1 call" if decided.applied == 1 else f"{count(decided.applied)} calls"
    text = f"{calls} {word}"
    if decided.late:
        text += f"; {count(decided.late)} had been decided, or waited no longer"
    if decided.first:
        was = "approved" if decided.first.approved else "denied"
        text += f" ({was} by {shown(decided.first.by, 60) or 'the time limit'})"
    return text


def _equal(waiting: Sequence[Ask]) -> list[list[Ask]]:
    """Return equal calls together, the oldest first."""
    found: dict[str, list[Ask]] = {}
    for one in waiting:
        found.setdefault(one.group, []).append(one)
    return list(found.values())


def waiting_picture(waiting: Sequence[Ask]) -> RenderableType:
    """Return the calls, equal ones together, each with the commands that decide it."""
    if not waiting:
        return "Nothing waits for a person."
    wait = "1 call waits" if len(waiting) == 1 else f"{count(len(waiting))} calls wait"
    groups, places = _equal(waiting), places_of(waiting)
    parts: list[RenderableType] = [Text(f"{wait} for a person", style="bold")]
    for same in groups[:_GROUPS]:
        parts += [call_text(same[0]), *(Text("  ").append(one) for one in _lines(same, places))]
    if len(groups) > _GROUPS:
        parts.append(f"and {count(len(groups) - _GROUPS)} groups more: --json lists all")
    if any(same[0].kind == "approval" for same in groups[:_GROUPS]):
        parts.append(
            Text("To deny: stepfleet decide ... --deny --reason TEXT (the model reads it).")
        )
    return Group(*parts)


def call_text(approval: Ask) -> Text:
    """Return the call in a line: its question, or its tool with the arguments."""
    if approval.kind == "question":
        options = approval.arguments.get("options") or ()
        choice = f" ({shown(', '.join(map(str, options)), _LONGEST)})" if options else ""
        return Text(f"{shown(approval.agent, 60)} asks: ").append(
            f"{shown(approval.arguments.get('question', ''), 2 * _LONGEST)}{choice}", style="cyan"
        )
    call = f"{shown(approval.tool, 60)}({shown(approval.arguments, _LONGEST)})"
    return Text(f"{shown(approval.agent, 60)} calls ").append(call, style="cyan")


def call_and_commands(approval: Ask, place: str) -> str:
    """Return a call and the commands that decide it, a line each; `place` is what these take."""
    data = data_option()
    commands = [f"stepfleet decide {place} --answer TEXT{data}"]
    if approval.kind != "question":
        commands = [
            f"stepfleet decide {place} --approve{data}",
            f"stepfleet decide {place} --deny --reason TEXT{data}",
        ]
    return "\n  ".join([call_text(approval).plain, *commands])


def _lines(same: Sequence[Ask], places: Mapping[str, str]) -> list[Text]:
    """Return since when equal calls wait, what ends the wait, and the commands that decide them."""
    approval = same[0]
    until = f", at the latest until {moment(approval.until)}" if approval.until else ""
    lines = [Text(f"since {moment(approval.since)}{until}", style="dim")]
    if approval.kind == "question":
        for one in same[:_RUNS]:
            command = f"stepfleet decide {places[one.key]} --answer TEXT{data_option()}"
            lines += [*_where(one), Text(command)]
    elif len(same) == 1:
        command = f"stepfleet decide {places[approval.key]} --approve{data_option()}"
        lines += [*_where(approval), Text(command)]
    else:
        lines.append(Text(f"{count(len(same))} equal calls, the first of {places[approval.key]}"))
        lines += _where(approval)
        lines.append(Text(f"stepfleet decide --group {approval.group} --approve{data_option()}"))
    if approval.kind == "question" and len(same) > _RUNS:
        lines.append(Text(f"and {count(len(same) - _RUNS)} runs more: --json lists all"))
    return lines


def _where(approval: Ask) -> list[Text]:
    """Return the line and the batch of a call's run, or the batch that pays for it."""
    if not approval.batch_id:
        return []
    line = f"line {shown(approval.line_id, _LINE)} of " if approval.line_id else ""
    return [Text(f"{line}batch {shown(approval.batch_id, _ID)}", style="dim")]


def places_of(waiting: Sequence[Ask]) -> dict[str, str]:
    """Return the arguments that name each call: its run, and its place if that has several."""
    several = Counter(one.run_id for one in waiting)
    return {
        one.key: shown(one.run_id if several[one.run_id] == 1 else f"{one.run_id}:{one.index}", _ID)
        for one in waiting
    }
