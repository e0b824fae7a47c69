"""Amounts in wei on real workers: each number is the same everywhere, and nothing hangs."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.deadlines import wait_until
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.memory.conversation import INSTRUCTIONS
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

FILE = Path(__file__).parents[1] / "agent_modules" / "exact_agents.py"
AGENTS = load_agents(str(FILE))
WEI = math.factorial(25)
LONG = 60.0
STRUCTURED = "structured_response"


def rules(request: RequestRecord) -> Reply:
    """Double, ask the ledger, pay, answer; the server reports no usage."""
    offered = [one["function"]["name"] for one in request.body.get("tools") or ()]
    if request.body["messages"][0]["content"] == INSTRUCTIONS:
        return Reply("a summary", latency=0.01)
    done = ToolCallReply(STRUCTURED, {"structured": {"wei": WEI}})
    if "pay" not in offered:
        return Reply("", tool_calls=(done,), latency=0.01)
    calls = [ToolCallReply(name, {"wei": WEI}) for name in ("double", "ledger", "pay")]
    turn = min(request.turn, 4)
    return Reply("", tool_calls=([*calls, done][turn - 1],), latency=0.01)


@pytest.fixture
def run_ids(
    model: ModelServer, start_worker: Callable[..., FleetWorker], redis_url: str
) -> Iterator[tuple[str, ...]]:
    """Two runs of a batch, which wait for approvals of their payments."""
    model.follow(rules)
    start_worker(env={"STEPFLEET_AGENTS": str(FILE)})
    row = {"wei": WEI, "rate": 1.5}
    with Fleet(redis_url) as fleet:
        batch = fleet.submit_batch([{"id": one, **row} for one in "ab"], AGENTS["treasurer"])
        wait_until(lambda: len(list(fleet.approvals.all())) == 2, within=LONG, what="two questions")
        yield (batch.id, *(one.run_id for one in fleet.approvals.all()))


def test_a_fleet_of_real_workers_has_whole_numbers_of_any_size(
    run_ids: tuple[str, ...], redis_url: str, commands: CommandLine
) -> None:
    """Sub-agents, approvals, events and every form of results; metadata and inputs of results."""
    batch_id, *runs = run_ids

    def told(*words: str) -> str:
        done = commands(*words, STEPFLEET_REDIS_URL=redis_url)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert f'pay({{"wei":{WEI}}})' in told("approvals").replace("\n", "")
    assert [one["arguments"] for one in json.loads(told("approvals", "--json"))] == [
        {"wei": WEI}
    ] * 2
    with Fleet(redis_url) as fleet:
        assert fleet.decide(tool="pay").applied == 2
        results = [fleet.runs.wait(one, timeout=LONG) for one in runs]
        assert [one.structured for one in results] == [{"wei": WEI}] * 2
        again = fleet.submit(AGENTS["ledger"], results[0], metadata={"wei": WEI})
        assert fleet.runs.wait(again, timeout=LONG).metadata == {"wei": WEI}
        given = next(one for one in fleet.runs.show(again).state.messages if one.is_prompt())
        assert str(WEI) in given.text
    for kind in ("stepfleet", "jsonl", "openai"):
        lines = told("results", batch_id, "--format", kind).splitlines()
        assert len(lines) == 2
        assert all(str(WEI) in line for line in lines)
    told("results", batch_id, "--out", "o.parquet", "--fields", "id,structured.*")
    for words in (("show", runs[0]), ("show", runs[0], "--json"), ("events", runs[0])):
        assert str(WEI) in told(*words).replace("\n", "")
    told("checkpoint", runs[0], "--out", "c.json")
    assert str(WEI) in (commands.folder / "c.json").read_text()


def test_a_file_is_sent_with_its_own_numbers_and_all_its_lines_are_written(
    model: ModelServer,
    start_worker: Callable[..., FleetWorker],
    redis_url: str,
    commands: CommandLine,
) -> None:
    asked: list[str] = []

    def answer(request: RequestRecord) -> Reply:
        asked.append(str(request.body["messages"][-1]["content"]))
        done = ToolCallReply(STRUCTURED, {"structured": {"wei": WEI}})
        return Reply("", tool_calls=(done,), latency=0.01)

    model.follow(answer)
    start_worker(env={"STEPFLEET_AGENTS": str(FILE)})
    lines = [f'{{"id": "{n}", "wei": {WEI + n}, "rate": 1.{n}0}}\n' for n in range(6)]
    commands.write("in.jsonl", "".join(lines))
    done = commands(
        *("submit", "in.jsonl", "--agents", str(FILE), "--agent", "treasurer"),
        *("--wait", "--out", "out.jsonl"),
        STEPFLEET_REDIS_URL=redis_url,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(asked) == [f"Settle {WEI + n} at 1.{n}0." for n in range(6)]
    written = map(json.loads, (commands.folder / "out.jsonl").read_text().splitlines())
    assert [one["structured"] for one in written] == [{"wei": WEI}] * 6
