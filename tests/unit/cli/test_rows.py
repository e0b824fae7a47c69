"""Rows that fit terminals of any width."""

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from stepfleet.orchestrator.cli.terminal import Column, Rows

BATCH = "d3e33475-64d6-5134-86bf-c4838b76859e"
AGENTS = ", ".join(f"researcher-{number}" for number in range(12))
COLUMNS = (
    Column("batch", key=True),
    Column("agent", key=True),
    Column("lost", number=True),
    Column("cost", number=True),
    Column("agents", long=True),
)


def printed(found: RenderableType, width: int) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(found)
    return captured.get()


@pytest.mark.parametrize("width", [50, 60, 80, 120, 300])
def test_ids_names_and_amounts_are_whole_on_terminals_of_any_width(width: int) -> None:
    rows = [(BATCH, "researcher", "", "$1,234.56", Text(AGENTS, style="red"))] * 2
    lines = printed(Rows(COLUMNS, rows), width).splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for part in (BATCH, "$1,234.56", *AGENTS.split(", ")):
        assert [word.strip(",") for word in words].count(part) == 2
    assert "lost" not in words


def test_what_fits_is_beside_each_other_and_numbers_end_at_the_same_place() -> None:
    rows = [("a", "x", "1", "$2.00", "solver"), ("total", "", "1,000", "$20.00", "")]
    head, first, total = printed(Rows(COLUMNS, rows, total=True), 80).splitlines()
    assert head.split() == ["batch", "agent", "lost", "cost", "agents"]
    assert first.index("$2.00") - 1 == total.index("$20.00")
    assert total.split() == ["total", "1,000", "$20.00"]


def test_long_cells_are_beneath_before_anything_else_is() -> None:
    found = printed(Rows(COLUMNS, [("a", "x", "", "$2.00", AGENTS)]), 80).splitlines()
    assert [one.split()[0] for one in found[:3]] == ["batch", "a", "agents"]
    assert found[2].startswith("  agents researcher-0, researcher-1,")
