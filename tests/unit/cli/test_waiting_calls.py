"""What `approvals` prints: calls that wait, and the commands that decide them."""

from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from stepfleet.orchestrator.cli.approvals import call_of, waiting_picture
from stepfleet.orchestrator.records.calls.answers import Ask

LONG_ID = "96378916-e656-57de-b717-84d632ada9b2.44d1fa8d6f.d040ec220c"


def ask(run_id: str, **fields: Any) -> Ask:
    given: dict[str, Any] = {
        "kind": "approval",
        "tool": "refund",
        "arguments": {"customer": "Ada", "euros": 120},
        "key": run_id,
        "index": 0,
        **fields,
    }
    return Ask(
        run_id=run_id,
        step=1,
        call_id="call",
        agent="cashier",
        since=datetime(2026, 1, 1, 12, tzinfo=UTC),
        until=datetime(2026, 1, 1, 13, tzinfo=UTC),
        **given,
    )


def question(run_id: str) -> Ask:
    asked = {"question": "Which colour?", "options": ["red", "blue"]}
    return ask(run_id, kind="question", tool="ask_person", arguments=asked)


def printed(*asks: Ask, width: int = 80) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(waiting_picture(asks), soft_wrap=True)  # as the command prints it
    return [line.strip() for line in captured.get().splitlines()]


@pytest.mark.parametrize("width", [80, 160])
def test_a_call_has_a_command_that_decides_it_in_one_line(width: int) -> None:
    lines = printed(ask(LONG_ID), width=width)
    assert lines[0] == "1 call waits for a person"
    assert 'cashier calls refund({"customer":"Ada","euros":120})' in lines
    assert f"stepfleet decide {LONG_ID} --approve" in lines
    assert "until 2026-01-01 13:00:00 UTC" in " ".join(lines)


def test_equal_calls_are_decided_by_one_command() -> None:
    one, other = ask("r1"), ask("r2")
    lines = printed(one, other)
    assert lines[0] == "2 calls wait for a person"
    assert "2 equal calls, the first of r1" in lines
    assert f"stepfleet decide --group {one.group} --approve" in lines


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"batch_id": LONG_ID[:36], "line_id": "bob"}, f"line bob of batch {LONG_ID[:36]}"),
        (
            {"batch_id": LONG_ID[:36], "line_id": "l" * 300},
            f"line {'l' * 24}… of batch {LONG_ID[:36]}",
        ),
        ({"batch_id": "b1"}, "batch b1"),  # of a run below one of the batch
    ],
)
def test_a_call_of_a_batch_is_listed_with_its_line_and_batch(
    fields: dict[str, str], says: str
) -> None:
    """Each in a line of 80 columns, also the first of equal calls, and each question."""
    assert says in printed(ask("r1", **fields))
    assert says in printed(ask("r1", **fields), ask("r2", key="other"))
    assert says in printed(question("r1").model_copy(update=fields))
    assert not any("batch" in line for line in printed(ask("r1")))


def test_a_question_has_its_options_and_a_command_for_each_of_three_runs() -> None:
    lines = printed(*(question(f"r{n}") for n in range(5)))
    assert "cashier asks: Which colour? (red, blue)" in lines
    assert [line for line in lines if "answer" in line] == [
        f"stepfleet decide r{n} --answer TEXT" for n in range(3)
    ]
    assert "and 2 runs more: --json lists all" in lines


def test_a_run_that_waits_for_two_calls_is_named_with_the_place_of_each() -> None:
    first, second = ask("r1"), ask("r1", arguments={"customer": "Bob"}, index=1, key="other")
    lines = printed(first, second)
    assert [line for line in lines if line.startswith("stepfleet")] == [
        "stepfleet decide r1:0 --approve",
        "stepfleet decide r1:1 --approve",
    ]


def test_nothing_that_waits_says_so() -> None:
    assert printed() == ["Nothing waits for a person."]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("abc", ("abc", None)),
        ("abc:12", ("abc", 12)),
        ("abc:\u00b2", ("abc:\u00b2", None)),
        ("abc:" + "9" * 5_000, ("abc:" + "9" * 5_000, None)),
    ],
)
def test_a_call_is_named_by_its_index_behind_the_run(
    text: str, meant: tuple[str, int | None]
) -> None:
    """Digits that are no number are part of an id that nobody has."""
    assert call_of(text) == meant
