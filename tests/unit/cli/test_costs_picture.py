"""What `costs` prints for people."""

from datetime import UTC, date, datetime
from decimal import Decimal

import pytest
from rich.console import Console, RenderableType

from stepfleet.orchestrator.cli.costs import calls_picture, costs_picture
from stepfleet.orchestrator.records.ledger import CallState, CostLine, CostRow, Costs

BATCH = "d3e33475-64d6-5134-86bf-c4838b76859e"
DAY = date(2026, 1, 1)


def printed(found: RenderableType, width: int = 80) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(found)
    return captured.get()


def row(usd: str, lost: str = "0", **group: str) -> CostRow:
    return CostRow(
        group=group,
        calls=1_234,
        input_tokens=123_456,
        output_tokens=3_456,
        usd=Decimal(usd),
        lost_usd=Decimal(lost),
    )


@pytest.mark.parametrize("by", [(), ("agent",), ("batch", "agent")])
def test_amounts_and_ids_are_whole_at_80_columns(by: tuple[str, ...]) -> None:
    group = {"batch": BATCH, "agent": "researcher"}
    rows = (row("0.591234567", **{key: group[key] for key in by}),) if by else ()
    text = printed(
        costs_picture(Costs(by=by, since=DAY, until=DAY, rows=rows, total=row("12.346")))
    )
    assert "…" not in text
    for part in ("123,456", "$12.35", *(("$0.5912",) if by else ()), *(group[key] for key in by)):
        assert part in text


def test_columns_without_any_value_are_left_out() -> None:
    text = printed(costs_picture(Costs(since=DAY, until=DAY, total=row("0.000000005"))))
    assert "$0.000000005" in text
    for name in ("cached", "of it lost", "may be paid", "saved"):
        assert name not in text
    lost = printed(costs_picture(Costs(since=DAY, until=DAY, total=row("0.5", lost="0.25"))))
    assert "of it lost" in lost
    assert "$0.2500" in lost


def test_single_calls_are_a_table_and_name_their_run_where_there_are_several() -> None:
    call = CostLine(
        run_id=BATCH,
        step=3,
        agent="editor",
        model="gpt-4o",
        state=CallState.LOST,
        input_tokens=7,
        usd=Decimal("0.012345"),
        time=datetime(2026, 1, 1, tzinfo=UTC),
    )
    one = printed(calls_picture([call], with_run=False), 120)
    assert one.split()[:2] == ["agent", "step"]
    for part in ("editor", "3", "gpt-4o", "lost", "$0.0123", "01-01 00:00:00"):
        assert part in one
    assert BATCH in printed(calls_picture([call], with_run=True))
    unknown = call.model_copy(update={"usd": None})
    assert "not known" in printed(calls_picture([unknown], with_run=False), 120)
