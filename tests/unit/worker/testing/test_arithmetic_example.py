import asyncio
import json
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stepfleet.orchestrator import calculator
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.rules import load_rules
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer
from stepfleet.worker.testing.service import RequestLog

FOLDER = Path(__file__).parents[4] / "examples" / "arithmetic"
COUNT = 2000
TOOL = {
    "type": "function",
    "function": {"name": "calculator", "parameters": dict(calculator.schema)},
}


@pytest.fixture(scope="module")
def problems() -> list[dict[str, Any]]:
    made = runpy.run_path(str(FOLDER / "problems.py"))["problems"]
    return list(made(COUNT, seed=3))


async def solve(session: aiohttp.ClientSession, url: str, problem: str) -> tuple[str, list[int]]:
    """Play the agent; return its final text and how many calls each turn made."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem}]
    calls: list[int] = []
    while True:
        body = {"model": "m", "messages": messages, "tools": [TOOL]}
        async with session.post(f"{url}/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            message = (await response.json())["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"], calls
        calls.append(len(message["tool_calls"]))
        for call in message["tool_calls"]:
            result = calculator(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


@pytest.mark.timeout(600)  # all of it is processor time, of which a busy machine gives little
@pytest.mark.parametrize("most", [240, pytest.param(COUNT, marks=pytest.mark.long)])
async def test_problems_are_solved_over_http(problems: list[dict[str, Any]], most: int) -> None:
    problems = problems[:most]
    rules = load_rules(f"{FOLDER / 'rules.py'}:rules")
    with ModelServer(rules, log=RequestLog(keep=0)) as server:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=50), timeout=aiohttp.ClientTimeout(total=None)
        ) as session:
            solved = await asyncio.gather(
                *(solve(session, server.url, problem["input"]) for problem in problems)
            )
        assert server.violations == ()
    for problem, (text, calls) in zip(problems, solved, strict=True):
        expected = problem["metadata"]
        assert f" {expected['answer']} " in text, problem
        assert sum(calls) == expected["calls"], problem
    assert any(2 in calls for _, calls in solved)


def test_problems_are_distinct_and_take_one_to_eight_calls(problems: list[dict[str, Any]]) -> None:
    assert len({one["input"] for one in problems}) == COUNT
    assert len({one["id"] for one in problems}) == COUNT
    counted = Counter(one["metadata"]["calls"] for one in problems)
    assert counted == dict.fromkeys(range(1, 9), COUNT // 8)
    assert all(type(one["metadata"]["answer"]) is int for one in problems)


def test_the_committed_problems_are_what_the_script_prints() -> None:
    printed = subprocess.run(
        [sys.executable, str(FOLDER / "problems.py"), "40"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert printed == (FOLDER / "problems.jsonl").read_text()
    assert len(printed.splitlines()) == 40


def test_a_failed_calculation_is_asked_for_again() -> None:
    rules = load_rules(f"{FOLDER / 'rules.py'}:rules")
    question = (
        "Ada starts with 4 eggs. Then 1 of them are sold. How many eggs does Ada have in the end?"
    )
    function = {"name": "calculator", "arguments": '{"expression": "4 - 1"}'}
    calls = [{"id": "a", "type": "function", "function": function}]
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": 'Error: {"error": {"code": "x"}}'},
    ]
    said = rules(RequestRecord(1, question, 2, 1, {"model": "m", "messages": messages}))
    assert isinstance(said, Reply)
    assert said.tool_calls[0].arguments == {"expression": "4 - 1"}


def test_the_agent_is_importable_by_path_and_names_no_server() -> None:
    """DOC-05"""
    solver = runpy.run_path(str(FOLDER / "agents.py"))["solver"]
    assert solver.name == "solver"
    assert [one.name for one in solver.tools] == ["calculator"]
    assert "http" not in (FOLDER / "agents.py").read_text()
