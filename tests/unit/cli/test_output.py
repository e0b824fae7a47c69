"""What is printed on a terminal, and what a file or a pipe gets."""

import contextlib
import io
import json
import os
import sys
from datetime import date
from pathlib import Path

import pytest

from stepfleet.orchestrator.cli.costs import print_costs
from stepfleet.orchestrator.cli.terminal import (
    bytes_out,
    notice,
    print_json,
    print_json_line,
    print_text,
)
from stepfleet.orchestrator.records.ledger import CostRow, Costs

CONTROLS = "\x7f\x84\x9b2J\u061c\u200e\u202eexe.txt\u2066\ufeff"
DATA = {"said": f"fine{CONTROLS}", "ünïcode": "ß 漢"}


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, name: str, act: object) -> str:
    """Return what a terminal got of what was written to a standard stream."""
    ours, theirs = os.openpty()
    with monkeypatch.context() as patched, os.fdopen(theirs, "w", encoding="utf-8") as stream:
        patched.setattr(sys, name, stream)
        act()  # type: ignore[operator]
    found = b""
    with contextlib.suppress(OSError):  # Linux's end of a terminal
        while part := os.read(ours, 10_000):
            found += part
    os.close(ours)
    return found.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("write", [print_json, print_json_line])
def test_json_on_a_terminal_directs_nothing_and_is_the_same_data(
    monkeypatch: pytest.MonkeyPatch, write: object
) -> None:
    shown = on_a_terminal(monkeypatch, "stdout", lambda: write(DATA))  # type: ignore[operator]
    assert not set(shown) & set(CONTROLS) - set("2Jexe.txt")
    assert json.loads(shown) == DATA
    assert "ß 漢" in shown


def test_so_do_texts_and_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"one\n\ttwo \x1b[2J{CONTROLS}"
    for name, write in (("stdout", print_text), ("stderr", notice)):
        shown = on_a_terminal(monkeypatch, name, lambda write=write: write(text))
        assert shown.startswith("one\n\ttwo \\u001b[2J\\u007f\\u0084\\u009b2J")
        assert "\u202e" not in shown


def test_costs_as_csv_direct_nothing_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs(
        since=date(2026, 11, 1),
        until=date(2026, 11, 2),
        by=("agent",),
        rows=(CostRow(group={"agent": f"ß\x1b[2J{CONTROLS}"}),),
        total=CostRow(),
    )
    shown = on_a_terminal(monkeypatch, "stdout", lambda: print_costs(costs, "csv"))
    assert shown.startswith("agent,calls")
    assert "ß\\u001b[2J\\u007f" in shown


def test_bytes_on_a_terminal_direct_nothing_wherever_they_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = f'id,"\x1b[2J{CONTROLS}"\n\tß 漢\n'.encode()

    def write() -> None:
        text = io.TextIOWrapper(bytes_out(), "utf-8", newline="", write_through=True)
        text.write("head\n")
        file = text.detach()
        for one in data:
            file.write(bytes([one]))
        file.flush()

    shown = on_a_terminal(monkeypatch, "stdout", write)
    assert not set(shown) & set(f"\x1b{CONTROLS}") - set("2Jexe.txt")
    assert shown.startswith('head\nid,"\\u001b[2J\\u007f\\u0084\\u009b2J')
    assert shown.endswith("\n\tß 漢\n")


def test_bytes_in_a_file_are_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "out.csv"
    with place.open("w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        bytes_out().write(CONTROLS.encode() + b"\xff")
    assert place.read_bytes() == CONTROLS.encode() + b"\xff"


def test_a_file_gets_the_characters_themselves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "out.json"
    with place.open("w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        print_json(DATA)
    assert CONTROLS in place.read_text("utf-8")
