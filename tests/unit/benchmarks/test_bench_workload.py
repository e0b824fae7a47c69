from typing import Any

import orjson
import pytest
from support.benchmarks import benchmark

from stepfleet.worker.testing import Reply, RequestRecord

agent, loads = benchmark("bench_agent"), benchmark("bench_load")
MORE, goes_on, rules = agent.MORE, agent.goes_on, agent.rules
Latencies, PlannedRun, Workload = loads.Latencies, loads.PlannedRun, loads.Workload
ideal_seconds, mean_step_seconds = loads.ideal_seconds, loads.mean_step_seconds
planned = loads.planned


def load(**changes: Any) -> Any:
    return Workload(**{"runs": 40, "steps": 5, "latency": Latencies(0.1, 0.4), **changes})


def said(run: Any, turn: int) -> Reply:
    body = {"messages": [{"role": "user", "content": run.line()["input"]}]}
    reply: Reply = rules(RequestRecord(1, run.name, turn, 1, body))
    return reply


def test_the_same_load_is_planned_alike() -> None:
    assert planned(load()) == planned(load())
    assert planned(load(seed=1)) != planned(load())


def test_the_last_call_asks_for_no_tool_and_the_others_by_their_share() -> None:
    asked = [one.tools for one in planned(load(tools=0.5, runs=400))]

    assert not any(tools[-1] for tools in asked)
    share = sum(sum(tools) for tools in asked) / (400 * 4)
    assert share == pytest.approx(0.5, abs=0.05)


def test_the_provider_says_what_a_run_has_planned() -> None:
    run = PlannedRun("r", (0.1, 0.2, 0.3), (True, False, False), tool_seconds=0.05)

    first, second, last = (said(run, turn) for turn in (1, 2, 3))

    assert [one.latency for one in (first, second, last)] == [0.1, 0.2, 0.3]
    assert first.tool_calls[0].arguments == {"seconds": 0.05}
    assert goes_on(str(second.content))
    assert second.content == MORE
    assert not goes_on(str(last.content))
    assert not last.tool_calls


def test_a_line_is_reported_by_the_runs_name() -> None:
    run = planned(load())[3]
    line = run.line()

    assert line["id"] == run.name
    assert orjson.loads(line["input"])["run"] == run.name


def test_the_ideal_is_the_longest_run_or_all_of_them_shared_out() -> None:
    runs = [PlannedRun("a", (3.0,), (False,), 0.0), PlannedRun("b", (1.0, 1.0), (True, False), 0.5)]

    assert ideal_seconds(runs, at_once=2) == 3.0
    assert ideal_seconds(runs, at_once=1) == 5.5
    assert mean_step_seconds(runs) == pytest.approx(5.5 / 3)
