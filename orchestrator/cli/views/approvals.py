"""Prints the calls that wait for people, and decides them."""

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from stepfleet.orchestrator.cli.options import data_option
from stepfleet.orchestrator.cli.setup.with_fleet import show, with_fleet
from stepfleet.orchestrator.cli.terminal.format import count, moment, shown
from stepfleet.orchestrator.cli.terminal.output import print_either
from stepfleet.orchestrator.cli.views.control import confirm
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.calls.answers import Ask, Decided

_INDEX = re.compile("[0-9]{1,9}")
_LONGEST = 70
_GROUPS = 50
_RUNS = 3
"""Runs with the same question that are named."""
_ID = 200
_LINE = 25
"""Characters of a line's id: with its batch it fits 80 columns."""
_SURE = "{count} calls, {groups}, will be {word}. Go on?"


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision as the command line has it."""

    approve: bool
    reason: str = ""
    by: str = ""
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Equal:
    """Equal calls that wait, the oldest first."""

    asks: tuple[Ask, ...]

    @property
    def ask(self) -> Ask:
        """The one that has waited longest."""
        return self.asks[0]

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.asks)


def conditions(**given: str | None) -> dict[str, str]:
    """Return the conditions that are given."""
    return {name: value for name, value in given.items() if value is not None}


def text_of(text: str) -> str:
    """Return the text of an argument; `-` stands for standard input."""
    return sys.stdin.read().strip() if text == "-" else text


def show_waiting(which: dict[str, str], data: Path, *, json: bool) -> None:
    """Print the calls that wait for people, or all of them as JSON."""

    async def read(fleet: AsyncFleet) -> list[Ask]:
        return [one async for one in fleet.approvals.all(**which)]

    show(data, read, picture, json=json, as_data=lambda asks: [_as_data(one) for one in asks])


def decide(
    run: str | None, which: dict[str, str], choice: Choice, data: Path, *, json: bool, sure: bool
) -> int:
    """Decide, and print how many calls that was. Returns 1 where it was none."""
    options: dict[str, Any] = {**which, "approve": choice.approve, "reason": choice.reason}
    options |= {"by": choice.by} if choice.by else {}
    options |= {"answer": choice.answer} if choice.answer is not None else {}
    if run is not None:
        named = run

        async def decide_one(fleet: AsyncFleet) -> Decided:
            run_id, call = await _found(fleet, named, which.get("batch"))
            which_one = {} if call is None else {"call": call}
            return await fleet.decide(run_id, **{**options, **which_one})

        decided = with_fleet(data, decide_one)
    else:
        if not which.keys() - {"kind"}:
            raise ConfigurationError("name a run, or which calls: --batch, --tool, --group ...")
        if not sure:
            options["before"] = _ask_once(which, choice, data)
        decided = with_fleet(data, lambda fleet: fleet.decide(**options))
    print_either(decided, lambda one: _words(one, choice), json=json, as_data=Decided.to_dict)
    return 0 if decided.applied else 1


def _ask_once(which: dict[str, str], choice: Choice, data: Path) -> datetime:
    """Ask once, and return when the newest of the calls began to wait that the question counts."""

    async def read(fleet: AsyncFleet) -> list[Ask]:
        return [one async for one in fleet.approvals.all(**which)]

    asks = with_fleet(data, read)
    if not asks:
        raise ConfigurationError("no such call waits; `stepfleet approvals` lists what does")
    groups = ", ".join(f"{one.ask.tool} ({count(one.count)})" for one in _equal(asks)[:5])
    word = "approved" if choice.approve else "denied"
    question = _SURE.format(count=count(len(asks)), groups=groups, word=word)
    confirm(question, "add --yes", word)
    return max(one.since for one in asks)


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


def _words(decided: Decided, choice: Choice) -> str:
    word = "answered" if choice.answer is not None else "approved" if choice.approve else "denied"
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


def _as_data(ask: Ask) -> dict[str, Any]:
    return {**ask.to_dict(), "group": ask.group}


def _equal(asks: Sequence[Ask]) -> list[Equal]:
    found: dict[str, list[Ask]] = {}
    for one in asks:
        found.setdefault(one.group, []).append(one)
    return [Equal(tuple(same)) for same in found.values()]


def picture(asks: Sequence[Ask]) -> RenderableType:
    """Return the calls, equal ones together, each with the commands that decide it."""
    if not asks:
        return "Nothing waits for a person."
    wait = "1 call waits" if len(asks) == 1 else f"{count(len(asks))} calls wait"
    groups, places = _equal(asks), places_of(asks)
    parts: list[RenderableType] = [Text(f"{wait} for a person", style="bold")]
    for one in groups[:_GROUPS]:
        indented = Padding(_lines(one, places), (0, 0, 0, 2))
        parts += [call_text(one.ask), indented]
    if len(groups) > _GROUPS:
        parts.append(f"and {count(len(groups) - _GROUPS)} groups more: --json lists all")
    if any(one.ask.kind == "approval" for one in groups[:_GROUPS]):
        parts.append(Text("To deny: stepfleet deny ... --reason TEXT (the model reads it)."))
    return Group(*parts)


def call_text(ask: Ask) -> Text:
    """Return the call in a line: its question, or its tool with the arguments."""
    if ask.kind == "question":
        options = ask.arguments.get("options") or ()
        choice = f" ({shown(', '.join(map(str, options)), _LONGEST)})" if options else ""
        return Text(f"{shown(ask.agent, 60)} asks: ").append(
            f"{shown(ask.arguments.get('question', ''), 2 * _LONGEST)}{choice}", style="cyan"
        )
    call = f"{shown(ask.tool, 60)}({shown(ask.arguments, _LONGEST)})"
    return Text(f"{shown(ask.agent, 60)} calls ").append(call, style="cyan")


def call_and_commands(ask: Ask, place: str) -> str:
    """Return a call and the commands that decide it, a line each; `place` is what these take."""
    data = data_option()
    commands = [f"stepfleet answer {place} TEXT{data}"]
    if ask.kind != "question":
        commands = [
            f"stepfleet approve {place}{data}",
            f"stepfleet deny {place} --reason TEXT{data}",
        ]
    return "\n  ".join([call_text(ask).plain, *commands])


def _lines(one: Equal, places: Mapping[str, str]) -> RenderableType:
    """Return since when equal calls wait, what ends the wait, and the commands that decide them."""
    ask = one.ask
    until = f", at the latest until {moment(ask.until)}" if ask.until else ""
    lines = [Text(f"since {moment(ask.since)}{until}", style="dim")]
    if ask.kind == "question":
        for same in one.asks[:_RUNS]:
            lines += [
                *_where(same),
                Text(f"stepfleet answer {places[same.key]} TEXT{data_option()}"),
            ]
    elif one.count == 1:
        lines += [*_where(ask), Text(f"stepfleet approve {places[ask.key]}{data_option()}")]
    else:
        lines.append(Text(f"{count(one.count)} equal calls, the first of {places[ask.key]}"))
        lines += _where(ask)
        lines.append(Text(f"stepfleet approve --group {ask.group}{data_option()}"))
    if ask.kind == "question" and one.count > _RUNS:
        lines.append(Text(f"and {count(one.count - _RUNS)} runs more: --json lists all"))
    return Group(*lines)


def _where(ask: Ask) -> list[Text]:
    """Return the line and the batch of a call's run, or the batch that pays for it."""
    if not ask.batch_id:
        return []
    line = f"line {shown(ask.line_id, _LINE)} of " if ask.line_id else ""
    return [Text(f"{line}batch {shown(ask.batch_id, _ID)}", style="dim")]


def places_of(asks: Sequence[Ask]) -> dict[str, str]:
    """Return what commands take for each call: its run, and its place where that has several."""
    several = Counter(one.run_id for one in asks)
    return {
        one.key: shown(one.run_id if several[one.run_id] == 1 else f"{one.run_id}:{one.index}", _ID)
        for one in asks
    }
