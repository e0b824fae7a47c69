"""Conditions on runs that did not complete."""

import time

import pytest

from stepfleet.orchestrator import Cause, ConfigurationError, FailedRun, StopReason
from stepfleet.orchestrator.batches.selection import Selection

CAUSE = Cause(kind="tool", code="TOOL_EXECUTION_ERROR", tool="stock", text="no such product")
RUN = FailedRun(
    run_id="r1",
    agent="clerk",
    model="openai:gpt-4o-mini",
    stop_reason=StopReason.STEPS_LIMIT,
    step=8,
    text="LookupError: no such product 'Gadgets, Ünlü'",
    cause=CAUSE,
)


@pytest.mark.parametrize(
    "where",
    [
        'error~"gadgets"',
        "error~gadgets",
        "error~ÜNLÜ",
        'error~"gadgets, ü"',
        r'error~"\'Gad"',
        "tool=stock",
        "tool = STOCK ",
        "tool~sto",
        "step=8",
        "step=08",
        "stop_reason=steps_limit",
        "stop_reason=max_steps",
        "model=openai:gpt-4o-mini",
        "agent=clerk",
        "code~tool_",
        f"cause={CAUSE.key}",
        "tool=stock,step=8,error~such",
    ],
)
def test_a_condition_that_holds_selects_the_run(where: str) -> None:
    assert Selection.parse(where).selects(RUN)


@pytest.mark.parametrize(
    "where",
    [
        "error~lamp",
        "error=gadgets",
        "tool=sto",
        "tool=stock,step=7",
        "stop_reason=time_limit",
        "cause=0123456789",
        "error~.*",
        "error~%",
    ],
)
def test_a_condition_that_does_not_hold_leaves_the_run_out(where: str) -> None:
    assert not Selection.parse(where).selects(RUN)


def test_several_texts_must_all_hold_and_none_selects_all() -> None:
    assert Selection.parse(["tool=stock", "step=8"]).selects(RUN)
    assert not Selection.parse(["tool=stock", "step=9"]).selects(RUN)
    assert Selection.parse(()).selects(RUN)


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("", "write conditions"),
        ("gadgets", "'gadgets'"),
        ("color=red", "'color'; use error, code, tool"),
        ("tool=", "tool has no value"),
        ('tool=""', "tool has no value"),
        ("step=one", "step takes a number"),
        ("step~1", "step takes a number"),
        ("stop_reason=limit", "'limit' is not a stop reason; use steps_limit"),
        ('error~"open', '"open'),
        ('error~"a"b', "is not a condition"),
        ("error~" + "a" * 2_000, "longer than 2000"),
    ],
)
def test_a_wrong_condition_is_refused_by_name(where: str, names: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Selection.parse(where)
    assert names in str(refused.value)


@pytest.mark.parametrize("where", ["cause=0123456789", "tool=a,stop_reason=user_requested"])
def test_cancelled_runs_are_meant_by_a_condition_on_the_end(where: str) -> None:
    assert Selection.parse(where).with_cancelled
    assert not Selection.parse("tool=a,error~b,step=1").with_cancelled


def test_hostile_conditions_cost_little() -> None:
    began = time.process_time()
    for part in ('\\"', '"', "a=", "a=\\", " ", "=~"):
        for start in ('error~"', "error~", ""):
            given = (start + part * 1_000)[:2_000]
            try:
                Selection.parse(given)
            except ConfigurationError:
                continue
    assert time.process_time() - began < 20
