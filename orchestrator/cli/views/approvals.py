"""Prints the calls that wait for people, and decides them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from stepfleet.orchestrator.cli.setup.with_fleet import show, with_fleet
from stepfleet.orchestrator.cli.terminal.format import count, moment, shown
from stepfleet.orchestrator.cli.terminal.output import print_either
from stepfleet.orchestrator.cli.views.control import confirm
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.calls.answers import Ask, Decided

_LONGEST = 70
_GROUPS = 50
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
    """Equal calls that wait, by the one that has waited longest."""

    ask: Ask
    count: int
    runs: tuple[str, ...]


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

    show(data, read, _picture, json=json, as_data=lambda asks: [_as_data(one) for one in asks])


def decide(
    run: str | None, which: dict[str, str], choice: Choice, data: Path, *, json: bool, sure: bool
) -> int:
    """Decide, and print how many calls that was. Returns 1 where it was none."""
    options: dict[str, Any] = {**which, "approve": choice.approve, "reason": choice.reason}
    options |= {"by": choice.by} if choice.by else {}
    options |= {"answer": choice.answer} if choice.answer is not None else {}
    if run is not None:
        run_id, call = _call_of(run)
        options |= {} if call is None else {"call": call}
        decided = with_fleet(data, lambda fleet: fleet.decide(run_id, **options))
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


def _call_of(run: str) -> tuple[str, int | None]:
    run_id, colon, call = run.rpartition(":")
    return (run_id, int(call)) if colon and call.isdigit() else (run, None)


def _words(decided: Decided, choice: Choice) -> str:
    word = "answered" if choice.answer is not None else "approved" if choice.approve else "denied"
    calls = "1 call" if decided.applied == 1 else f"{count(decided.applied)} calls"
    text = f"{calls} {word}"
    if decided.late:
        text += f"; {count(decided.late)} had been decided, or had gone on"
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
    return [Equal(same[0], len(same), tuple(one.run_id for one in same)) for same in found.values()]


def _picture(asks: Sequence[Ask]) -> RenderableType:
    if not asks:
        return "Nothing waits for a person."
    table = Table(title=f"{count(len(asks))} calls wait for a person", title_justify="left")
    for heading in ("calls", "agent", "call", "since", "decides itself", "run", "group"):
        table.add_column(heading, overflow="fold")
    groups = _equal(asks)
    for one in groups[:_GROUPS]:
        ask = one.ask
        call = f"{shown(ask.tool, 60)}({shown(ask.arguments, _LONGEST)})"
        others = f" and {count(one.count - 1)} more" if one.count > 1 else ""
        until = moment(ask.until) if ask.until else ""
        run = f"{shown(ask.run_id, 80)}:{ask.index}{others}"
        row = (count(one.count), shown(ask.agent, 60), call, moment(ask.since), until, run)
        table.add_row(*row, ask.group)
    if len(groups) > _GROUPS:
        table.caption = f"and {count(len(groups) - _GROUPS)} groups more: --json lists all"
    return table
