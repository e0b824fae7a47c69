"""What `show` prints of a run besides its steps."""

from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console
from support.runs.agent_records import a_call, a_step

from stepfleet.orchestrator import AgentRunResult, Lifecycle, Message, RunPage, RunSummary, RunTree
from stepfleet.orchestrator.cli.explain import AwaitedTool, judged
from stepfleet.orchestrator.cli.look import below, page_picture
from stepfleet.orchestrator.cli.trace import trace
from stepfleet.orchestrator.records.calls.answers import Decision, RunEnd
from stepfleet.orchestrator.records.run.facts import OriginKind, RunOrigin
from stepfleet.orchestrator.store.fleet.overview import WorkerSeen

RENDER = AwaitedTool("render", "gpu")


def printed(
    *awaited: AwaitedTool, inputs: dict[int, tuple[Message, ...]] | None = None, **fields: Any
) -> str:
    result = AgentRunResult(
        run_id="r1",
        agent_name="solver",
        lifecycle=Lifecycle.IN_PROGRESS,
        start_time=datetime(2026, 1, 1, tzinfo=UTC),
        max_iterations=10,
        **fields,
    )
    console = Console(width=200)
    with console.capture() as captured:
        console.print(trace(result, inputs or {}, full=False, awaited=awaited))
    return captured.get()


@pytest.mark.parametrize(
    ("kind", "at", "told"),
    [
        (OriginKind.FORK, 2, "forked from r0, after 2 steps"),
        (OriginKind.FORK, 0, "forked from r0, from its beginning"),
        (OriginKind.CHECKPOINT, 1, "restored from a checkpoint of r0, after 1 step"),
        (OriginKind.RESULT, 0, "given the result of r0"),
    ],
)
def test_a_run_that_came_of_another_says_so(kind: OriginKind, at: int, told: str) -> None:
    assert told in printed(origin=RunOrigin(kind=kind, run_id="r0", at=at))
    assert "origin" not in printed()


def test_each_turn_shows_what_was_asked_where_it_was_asked() -> None:
    """STATE-09: the newest user message of each input, and one that has no step yet."""
    history = (Message.user("old"), Message.assistant("so"), Message.user("first"))
    inputs = {0: history, 2: (Message.user("second"),), 3: (Message.user("third"),)}
    text = printed(inputs=inputs, steps=tuple(a_step(number) for number in (1, 2, 3)))
    places = [text.index(one) for one in ("first", "step 2", "second", "step 3", "third")]
    assert places == sorted(places)
    assert "old" not in text


def test_a_run_that_waits_for_a_tool_names_its_queue_and_who_is_missing() -> None:
    steps = WorkerSeen(name="a", seen_seconds_ago=1.0, queues=("stepfleet",))
    gpu = WorkerSeen(name="b", seen_seconds_ago=1.0, queues=("gpu",))
    gone = gpu.model_copy(update={"alive": False})
    old = WorkerSeen(name="c", seen_seconds_ago=1.0)
    for nobody in ((), (steps, gone)):
        text = printed(*judged([RENDER], nobody))
        assert "waits for tool 'render' on queue 'gpu', which no running worker serves" in text
        assert "stepfleet worker --agents MODULE --queue gpu" in text
    for somebody in ((steps, gpu), (steps, old)):
        text = printed(*judged([RENDER], somebody))
        assert "waits for tool 'render' on queue 'gpu'\n" in text.replace(" \n", "\n")


@pytest.mark.parametrize(
    ("decision", "told"),
    [
        ({"approved": True, "by": "grace"}, "approved by grace, 2026-01-01 00:00:00 UTC"),
        ({"approved": True, "by": "grace", "text": "blue"}, "answered by grace"),
        ({"approved": False, "by": "grace", "reason": "too\nmuch"}, "denied by grace, "),
        ({"approved": False, "reason": "too\nmuch"}, " UTC: too much"),
        ({"approved": False, "by_default": True}, "denied by the time limit"),
    ],
)
def test_a_call_says_who_decided_it_and_when(decision: dict[str, Any], told: str) -> None:
    made = Decision(at=datetime(2026, 1, 1, tzinfo=UTC), **decision)
    assert told in printed(steps=(a_step(1, tool_calls=(a_call(decision=made),)),))


@pytest.mark.parametrize(
    ("status", "reason", "told"),
    [
        ("max_iterations_reached", "time_limit", "stopped (time_limit)"),
        ("completed", "completed", "completed"),
        ("error", "of_a_later_version", "error"),
    ],
)
def test_a_call_tells_the_end_of_its_run_as_the_tree_does(
    status: str, reason: str, told: str
) -> None:
    end = RunEnd(run_id="r2", agent="trap", status=status, stop_reason=reason, steps=1)
    text = printed(steps=(a_step(1, tool_calls=(a_call(run=end, duration_ms=0.0),)),))
    assert f"run r2 of trap: {told}, 1 step" in text
    assert " ms" not in text


def test_the_cost_of_a_run_stands_beside_that_of_the_runs_below_and_both_together() -> None:
    text = printed(cost_usd=0.25, below_cost_usd=0.5)
    assert "$0.2500; runs below: 0 tokens, $0.5000; together $0.7500" in text
    assert "together" not in printed(cost_usd=0.25)


def test_the_cause_at_the_end_of_a_nested_error_is_shown() -> None:
    nested = "run 1 of agent 'a' ended as error: " * 20 + "the card was refused"
    assert "the card was refused" in printed(error=nested)


def test_runs_below_a_run_are_a_tree_that_says_how_much_is_left_out() -> None:
    console = Console(width=120)
    now = datetime(2026, 1, 1, tzinfo=UTC)

    def tree(name: str, *below: RunTree, left_out: int = 0, **fields: Any) -> RunTree:
        given = {"run_id": name, "agent": f"\x1b[31m{name}", "created": now, "updated": now}
        run = RunSummary(**{**given, "status": Lifecycle.COMPLETED, **fields})
        return RunTree(run=run, below=below, left_out=left_out)

    assert below(tree("root")) is None
    stopped = tree("leaf", status="stopped", stop_reason="steps_limit", steps=1, cost_usd=0.5)
    with console.capture() as captured:
        shown = below(tree("root", tree("child", stopped, steps=2), left_out=7))
        assert shown is not None
        console.print(shown)
    lines = [line.strip(" │├└─") for line in captured.get().splitlines()]
    assert lines[0] == "runs below"
    assert lines[1].endswith("child: completed, 2 steps  child")
    assert lines[2].endswith("leaf: stopped (steps_limit), 1 step, $0.5000  leaf")
    assert lines[3] == "and 7 more"
    assert "\x1b" not in captured.get()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_list_of_runs_has_whole_ids_on_terminals_of_any_width(width: int) -> None:
    run = RunSummary(
        run_id="d3e33475-64d6-5134-86bf-c4838b76859e",
        status=Lifecycle.FAILED,
        agent="solver",
        line_id="problem-00040",
        steps=8,
        created=datetime(2026, 1, 1, tzinfo=UTC),
        updated=datetime(2026, 1, 1, tzinfo=UTC),
        error="rate limit " * 9,
    )
    console = Console(width=width)
    with console.capture() as captured:
        console.print(page_picture(RunPage(runs=(run,), next=None, looked_at=1)))
    text = captured.get()
    assert all(part in text for part in (run.run_id, "problem-00040", "solver", "rate limit"))
