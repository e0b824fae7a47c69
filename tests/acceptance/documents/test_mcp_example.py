"""The example with an MCP server, by the command that its page names."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers.redis_servers import short_folder
from support.workers.command_line import CommandLine

FOLDER = Path(__file__).parents[3] / "examples" / "mcp"


@pytest.fixture
def stepfleet() -> Iterator[CommandLine]:
    with short_folder() as folder:
        commands = CommandLine(folder)
        try:
            yield commands
        finally:
            commands.end()


def test_the_librarian_answers_with_what_its_server_knows(stepfleet: CommandLine) -> None:
    done = stepfleet(
        *("run", str(FOLDER / "questions.jsonl"), "--agents", str(FOLDER / "agents.py")),
        *("--simulate", f"{FOLDER / 'rules.py'}:rules", "--out", "out.jsonl"),
        within=100,
    )
    assert done.returncode == 0, done.stderr
    assert {line["id"]: line["output"] for line in stepfleet.lines("out.jsonl")} == {
        "where-1": "Middlemarch is on shelf E2.",
        "where-2": "Walden is nowhere: all copies are lent.",
        "where-3": "The library does not have Ulysses.",
        "oldest-1": "Emma, of 1815, is the oldest book of Jane Austen.",
        "oldest-2": "Middlemarch, of 1871, is the oldest book of George Eliot.",
    }
    questions = (FOLDER / "questions.jsonl").read_text().splitlines()
    assert len(questions) == len({json.loads(line)["id"] for line in questions})
