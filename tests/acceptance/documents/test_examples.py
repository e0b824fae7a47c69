"""The commands of examples/README.md do what it says, from a bare folder: no key, no Redis."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.documents.documents import ROOT, blocks_of
from support.servers.redis_servers import short_folder
from support.workers import warm_starts

from stepfleet.orchestrator import Agent, AsyncFleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker
from stepfleet.worker.testing.rules import load_rules
from stepfleet.worker.testing.server import ModelServer

EXAMPLES = ROOT / "examples"
PAGE = (EXAMPLES / "README.md").read_text(encoding="utf-8")
COMMANDS = {
    command.split("examples/", 1)[1].split("/", 1)[0]: command
    for block in blocks_of(PAGE)
    if block.language == "bash"
    and (command := block.text.replace("\\\n", " ")).startswith(("stepfleet run", "python ex"))
    and "problems.py" not in command
}
ELSEWHERE = {"mcp"}
"""Examples whose commands have a test of their own."""
KEPT = ("HOME", "LANG", "TMPDIR")

ANSWERS: Mapping[str, Mapping[str, Any]] = {
    "simple_agent": {
        "market": "FRESH HERRING ON THE MARKET TODAY.",
        "bridge": "THE BRIDGE CLOSES AT TEN.",
        "lost": "A GREY CAT WAS FOUND NEAR THE MILL.",
    },
    "multi_tool_agent": {
        "bergen": "The train from Oslo to Bergen costs 694.5 kroner.",
        "voss": "The bus from Bergen to Voss costs 107.0 kroner.",
        "nowhere": "I know no way from Oslo to Atlantis.",
    },
    "structured_output": {
        "lamps": {"product": "lamp", "pieces": 3},
        "chair": {"product": "chair", "pieces": 1},
        "candles": {"product": "candle", "pieces": 12},
    },
    "custom_llm": {"short": "3 words", "long": "12 words"},
    "heavy_tool": {
        "hundred": "There are 25 prime numbers below 100.",
        "million": "There are 78498 prime numbers below 1000000.",
    },
    "approval": {
        "small": "Done: 20 euros paid to Ada.",
        "large": "A colleague has to look at that.",
    },
    "team": {
        "herring": "Herring swim in schools of millions. Why is that?",
        "bridges": "Bridges move in the wind. Why is that?",
        "visitor": "Herring were in issue 7.",
        "writer": "Bridges move in the wind. Why is that?",
    },
}
TALK = """\
Add milk, bread and tea.  milk, bread, tea
Drop tea.  milk, bread
Add coffee.  milk, bread, coffee
turns: 3, steps in all: 3
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a copy of the examples and nothing else; socket paths in it are short."""
    with short_folder() as empty:
        ignored = shutil.ignore_patterns("__pycache__", ".stepfleet")
        shutil.copytree(EXAMPLES, empty / "examples", ignore=ignored)
        yield empty


def run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the example's command as it stands on the page."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {"PATH": path, **{one: os.environ[one] for one in KEPT if one in os.environ}}
    command, *arguments = COMMANDS[name].split()
    if command == "stepfleet":
        done = warm_starts.run(warm_starts.COMMAND, arguments, env=env, cwd=folder, within=100)
    else:
        done = subprocess.run(
            [command, *arguments],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def results(folder: Path) -> dict[str, dict[str, Any]]:
    (file,) = folder.glob("*.jsonl")
    lines = file.read_text(encoding="utf-8").splitlines()
    return {one["id"]: one for one in map(json.loads, lines)}


def said(result: Mapping[str, Any]) -> Any:
    return result["output"] if result["structured"] is None else result["structured"]


def test_the_page_has_a_command_for_every_example() -> None:
    folders = {one.parent.name for one in EXAMPLES.glob("*/agents.py")}
    assert set(COMMANDS) - ELSEWHERE == folders - ELSEWHERE
    assert all(f"| `{one}/` |" in PAGE for one in folders)


@pytest.mark.parametrize("name", ANSWERS)
def test_an_examples_command_answers_all_its_questions_on_a_fleet(name: str, folder: Path) -> None:
    """DOC-05: private Redis, a real worker, the simulated model over HTTP."""
    run(name, folder)
    assert {key: said(one) for key, one in results(folder).items()} == ANSWERS[name]


@pytest.mark.parametrize("name", ["arithmetic", "research"])
def test_the_longer_examples_complete_all_their_runs(name: str, folder: Path) -> None:
    """DOC-05"""
    run(name, folder)
    found = results(folder)
    assert {one["status"] for one in found.values()} == {"completed"}
    for one in found.values():
        assert str(one["metadata"].get("answer", "")) in one["output"]
    (inputs,) = (folder / "examples" / name).glob("*.jsonl")
    assert len(found) == len(inputs.read_text(encoding="utf-8").splitlines())


def test_the_turns_of_a_conversation_know_what_was_said_before(folder: Path) -> None:
    """DOC-05, STATE-09"""
    assert run("several_turns", folder).stdout == TALK


def test_map_reduce_ends_with_one_sum_of_all_reviews(folder: Path) -> None:
    """DOC-05, MULTI-04"""
    assert run("map_reduce", folder).stdout == "72 positive, 48 negative\n"


@pytest.mark.parametrize("name", ["simple_agent", "multi_tool_agent", "custom_llm"])
async def test_the_same_agents_give_the_same_answers_in_one_process(
    name: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DOC-05, DIST-16"""
    (agent,) = load_agents(str(EXAMPLES / name / "agents.py")).values()
    rules = EXAMPLES / name / "rules.py"
    with ModelServer(load_rules(f"{rules}:rules") if rules.exists() else None) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        assert await answers(agent, EXAMPLES / name, redis_url) == ANSWERS[name]
        assert server.violations == ()


async def answers(agent: Agent, folder: Path, redis_url: str) -> dict[str, Any]:
    lines = (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    asked = {one["id"]: one["input"] for one in map(json.loads, lines)}
    settings = load_settings(redis_url=redis_url)
    async with AsyncFleet(redis_url) as fleet, InlineWorker(settings, [agent]) as worker:
        runs = {key: await fleet.submit(agent, text) for key, text in asked.items()}
        await worker.finish(*runs.values())
        return {key: (await fleet.runs.result(run_id)).output for key, run_id in runs.items()}
