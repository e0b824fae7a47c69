"""`stepfleet run` where every call is refused alike: the batch is held, and goes on when mended."""

import shlex
import subprocess
from collections.abc import Iterator

import orjson
import pytest
from support.servers.redis_servers import short_folder
from support.workers.command_line import CommandLine

from stepfleet.worker.testing.scenario import Fault, Reply
from stepfleet.worker.testing.server import ModelServer

REFUSED = """\
from pathlib import Path

from stepfleet.worker.testing import Fault, Reply


def rules(request):
    return Reply("answer") if Path("mended").exists() else Fault("unauthorized")
"""
RUNS, MOST = 60, 5
RUN = ("run", "questions.jsonl", "--agents", "agents.py", "--simulate", "rules.py:rules")


@pytest.fixture
def stepfleet() -> Iterator[CommandLine]:
    with short_folder() as folder:
        commands = CommandLine(folder, STEPFLEET_HOLD_AFTER=str(MOST))
        try:
            yield commands
        finally:
            commands.end()


def test_a_refused_key_ends_some_runs_and_all_complete_behind_the_fix(
    stepfleet: CommandLine,
) -> None:
    stepfleet.write("rules.py", REFUSED)
    stepfleet.questions(*(f"question {n}" for n in range(RUNS)))
    done = stepfleet(*RUN, "--json")
    assert done.returncode == 1
    batch = orjson.loads(done.stdout)
    assert (batch["failed"], batch["paused"]) == (MOST, RUNS - MOST)
    assert batch["held"]["cause"]["code"] == "INVALID_API_KEY"
    (advice,) = [line for line in done.stderr.splitlines() if line.startswith("Held: ")]
    assert f"{MOST} runs in a row failed with the same error: 127.0.0.1 answered 401" in advice
    assert "OPENAI_API_KEY" in advice

    shown = " ".join(stepfleet("status", batch["batch_id"]).stdout.split())
    assert f"Fix it, then: stepfleet resume --batch {batch['batch_id']}" in shown
    assert f"held at {MOST}/{RUNS}" in stepfleet("status").stdout
    watched = stepfleet("watch", batch["batch_id"]).stderr
    assert "The batch is held: " in watched
    assert "has ended" not in watched

    (stepfleet.folder / "mended").touch()
    command = advice.partition("Fix it, then: stepfleet ")[2].partition(" (it resumes")[0]
    again = stepfleet(*shlex.split(command), "--json")
    assert again.returncode == 0, again.stderr
    assert orjson.loads(again.stdout)["completed"] == RUNS
    assert orjson.loads(again.stdout)["held"] is None


def test_a_refused_key_is_found_before_anything_is_submitted(stepfleet: CommandLine) -> None:
    """By `run`, and by `submit` where the key is the client's own; --no-check goes on."""
    stepfleet.questions("one")
    with ModelServer(lambda _: Fault("unauthorized")) as model:

        def called(*arguments: str) -> subprocess.CompletedProcess[str]:
            return stepfleet(
                *arguments,
                OPENAI_BASE_URL=model.url,
                OPENAI_API_KEY="sk-refused-0123456789",
                STEPFLEET_NO_CHECK="0",
            )

        for command in (RUN[:4], ("submit", *RUN[1:4])):
            done = called(*command)
            assert done.returncode == 2, done.stderr
            said = " ".join(done.stderr.split())
            assert "model 'gpt-4o-mini' at http://127.0.0.1" in said
            assert "Fix: set OPENAI_API_KEY to a valid key; nothing was submitted" in said
            assert "sk-refused" not in said
        assert called(*RUN[:4], "--no-check").returncode == 1
        ended = called(*RUN[:4], "--json")
        retry = (*RUN[:1], "--batch", orjson.loads(ended.stdout)["batch_id"], *RUN[2:4])
        assert len(model.requests) == 3, "two test calls and a run's; none where nothing is left"
        assert called(*retry, "--retry-failed").returncode == 2
        model.follow(lambda _: Reply("answer"))
        assert called(*retry, "--retry-failed").returncode == 0
        assert [one.body.get("max_tokens") for one in list(model.requests)[3:]] == [1, 1, None]
