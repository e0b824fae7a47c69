"""Failures by cause on a terminal, and the commands that retry them."""

from typing import Any

from rich.console import Console, RenderableType

from stepfleet.orchestrator import Cause, FailedRun, FailureGroup, Failures, StopReason
from stepfleet.orchestrator.cli.batches import failures_data, failures_picture, raises, top

BATCH = "7d7bbd5c-3f0e-5f0c-9d0e-6f3a3a4ad8a1"


def _group(runs: int, text: str = "no such product '…'", **fields: Any) -> FailureGroup:
    cause = Cause(kind="tool", code="X", tool="stock", text=text)
    example = FailedRun(
        run_id="r1",
        line_id="q-1",
        agent="clerk",
        model="m",
        stop_reason=StopReason.STEPS_LIMIT,
        step=8,
        text="no such product 'gadgets'",
        cause=cause,
    )
    given = {"steps": {8: runs}, "models": {"m": runs}, "stop_reasons": {"steps_limit": runs}}
    return FailureGroup(cause=cause, runs=runs, example=example, **{**given, **fields})


def _failures(*groups: FailureGroup, read: int | None = None) -> Failures:
    total = sum(group.runs for group in groups)
    return Failures(batch_id=BATCH, not_completed=total, read=read or total, groups=groups)


def _text(*parts: RenderableType, width: int = 60) -> str:
    console = Console(width=width, markup=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=True)
    return captured.get()


def test_a_group_has_its_example_and_an_unbroken_command_that_raises_its_limits() -> None:
    group = _group(1_200, limits={"max_steps": 16, "budget_usd": 0.1})
    shown = _text(failures_picture(_failures(group)))
    command = f"stepfleet retry --batch {BATCH} --where {group.where} --raise max_steps=16 --raise"
    assert command in shown
    assert "1,200  tool 'stock': no such product '…'" in shown
    assert "steps_limit; step 8; m" in shown
    assert "e.g. line q-1, run r1: no such product 'gadgets'" in " ".join(shown.split())
    assert failures_data(_failures(group))["groups"][0]["retry"].startswith(command)


def test_large_limits_are_whole_numbers_in_the_command() -> None:
    group = _group(1, limits={"token_limit": 20_000_000})
    assert "--raise token_limit=20000000" in _text(failures_picture(_failures(group)))


def test_a_retry_of_all_groups_raises_each_limit_to_the_highest() -> None:
    """CONT-33: the hint after a run has the same options as each group's own command."""
    groups = [_group(2, limits={"max_steps": 8}), _group(1, limits={"max_steps": 16}), _group(3)]
    assert raises(groups) == " --raise max_steps=16"
    assert raises([]) == raises(groups[2:]) == ""


def test_a_group_of_many_steps_counts_the_most_frequent() -> None:
    shown = _text(failures_picture(_failures(_group(9, steps={2: 5, 3: 2, 4: 1, 5: 1}))))
    assert "step 2 (5), step 3 (2), step 4 (1) ..." in " ".join(shown.split())


def test_the_summary_has_three_causes_and_says_of_how_many_runs() -> None:
    groups = [_group(9 - number, text="x" * (number + 1)) for number in range(5)]
    shown = _text(*top(_failures(*groups, read=30)), width=200)
    assert shown.count("tool 'stock'") == 3
    assert "Causes (of 30 of 35 runs):" in shown
    assert f"stepfleet failures {BATCH}" in shown
    assert not list(top(_failures()))


def test_foreign_text_cannot_move_the_cursor() -> None:
    shown = _text(failures_picture(_failures(_group(1, text="red \x1b[31m"))))
    assert "\x1b" not in shown
