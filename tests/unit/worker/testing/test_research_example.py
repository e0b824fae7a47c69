import asyncio
import json
import runpy
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stepfleet.worker.testing.rules import load_rules
from stepfleet.worker.testing.server import ModelServer

FOLDER = Path(__file__).parents[4] / "examples" / "research"
QUESTIONS = [json.loads(line) for line in (FOLDER / "questions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def agents() -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / "agents.py"))


async def _result(tools: Any, call: dict[str, Any]) -> str:
    function = call["function"]
    try:
        value = await tools.get(function["name"]).execute(**json.loads(function["arguments"]))
    except LookupError as error:
        return "Error: " + json.dumps({"error": {"message": str(error)}})
    return value if isinstance(value, str) else json.dumps(value)


async def _answer(agent: Any, url: str, question: str) -> tuple[str, list[str]]:
    """Play the agent; return its final text and what its tools returned."""
    declared = [
        {"type": "function", "function": {"name": one.name, "parameters": dict(one.schema)}}
        for one in agent.tools
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    async with aiohttp.ClientSession() as session:
        while True:
            body = {"model": "m", "messages": messages, "tools": declared}
            async with session.post(f"{url}/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                message = (await response.json())["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return message["content"], [m["content"] for m in messages if m["role"] == "tool"]
            calls = message["tool_calls"]
            results = await asyncio.gather(*(_result(agent.tools, call) for call in calls))
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": result}
                for call, result in zip(calls, results, strict=True)
            ]


async def test_every_question_is_answered_with_the_agents_own_tools(agents: dict[str, Any]) -> None:
    """DOC-05"""
    with ModelServer(load_rules(f"{FOLDER / 'rules.py'}:rules")) as server:
        answered = await asyncio.gather(
            *(_answer(agents["researcher"], server.url, one["input"]) for one in QUESTIONS)
        )
        assert server.violations == ()
    by_id = {one["id"]: found for one, found in zip(QUESTIONS, answered, strict=True)}
    assert len(by_id) == len(QUESTIONS)
    for question in QUESTIONS:
        text, results = by_id[question["id"]]
        assert "I only answer" not in text
        topic = question["input"].removesuffix("?").split()[-1]
        if question["metadata"]["kind"] in {"describe", "figures"}:
            assert topic in text.lower()
        failed = any(one.startswith("Error: ") for one in results)
        assert failed == ("no statistics" in text)
    assert sum("no statistics" in text for text, _ in answered) == len(agents["NO_STATISTICS"])


async def test_the_slow_tool_takes_its_time(agents: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    said = await agents["check_sources"].execute(document_id="tides")
    assert loop.time() - begun >= agents["CHECKING_SECONDS"] * 0.99
    assert "none contradicted" in said


def test_an_unknown_document_is_an_error_that_names_the_known_ones(agents: dict[str, Any]) -> None:
    with pytest.raises(LookupError, match="bamboo, glaciers"):
        agents["read_document"]("../agents")


def test_the_agent_follows_the_policy_that_lets_it_go_on_after_failed_tools(
    agents: dict[str, Any],
) -> None:
    policy = agents["researcher"].config.error_policy
    assert policy.tool == "retry"
    assert policy.max_retries == 3
