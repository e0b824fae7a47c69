"""`stepfleet run` with less usual company: a pipe, a slow and faulty provider, others' workers."""

import os
import subprocess
from collections.abc import Iterator

import orjson
import pytest
from support.deadlines import wait_until
from support.servers.redis_servers import short_folder
from support.workers.command_line import CommandLine
from support.workers.frozen import freeze

from stepfleet.orchestrator import Fleet

LONG = 60.0
RUN = ("run", "questions.jsonl", "--agents", "agents.py", "--simulate", "rules.py:rules")


@pytest.fixture
def stepfleet() -> Iterator[CommandLine]:
    with short_folder() as folder:
        commands = CommandLine(folder)
        try:
            yield commands
        finally:
            commands.end()


def test_results_into_a_pipe_reach_its_reader(stepfleet: CommandLine) -> None:
    stepfleet.questions("one", "two")
    pipe = stepfleet.folder / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        done = stepfleet(*RUN, "--out", "pipe")
        said, _ = reader.communicate(timeout=LONG)

    assert done.returncode == 0, done.stderr
    assert sorted(orjson.loads(line)["id"] for line in said.splitlines()) == ["q0", "q1"]


def test_one_line_on_standard_input_is_answered_on_standard_output(
    stepfleet: CommandLine,
) -> None:
    stepfleet.write("text", "how are you?\n")
    stepfleet.write("line", '{"id": "a", "input": "and you?"}\n')

    text = stepfleet("run", "-", *RUN[2:], feed="text")
    line = stepfleet("run", "-", *RUN[2:], feed="line")
    asked = stepfleet("ask", "solver", "who?", *RUN[2:], "--json")

    assert (text.returncode, text.stdout) == (0, "answer to how are you?\n"), text.stderr
    assert (line.returncode, line.stdout) == (0, "answer to and you?\n"), line.stderr
    assert orjson.loads(asked.stdout)["output"] == "answer to who?"


def test_rows_that_are_added_are_another_batch_only_with_a_word(stepfleet: CommandLine) -> None:
    """A file that was refused in between leaves the batch that --only-new adds to as it is."""
    stepfleet.questions("one", "two")
    assert stepfleet(*RUN).returncode == 0
    stepfleet.questions("one", "two", "three")
    file = stepfleet.folder / "questions.jsonl"
    good = file.read_text()

    file.write_text(good + "oops\n")
    refused = stepfleet(*RUN)
    file.write_text(good)
    added = stepfleet(*RUN, "--only-new", "--json")
    stepfleet.questions("one", "two", "three", "four")
    anew = stepfleet(*RUN, "--json")

    assert refused.returncode == 2, refused.stderr
    assert added.returncode == 0, added.stderr
    assert "1 new rows" in added.stderr
    assert "have changed" not in added.stderr
    assert orjson.loads(added.stdout)["total"] == 3
    assert anew.returncode == 0, anew.stderr
    assert "have changed since batch" in anew.stderr
    assert "--only-new" in anew.stderr


def test_the_simulated_provider_can_be_slow_and_fail_now_and_then(stepfleet: CommandLine) -> None:
    stepfleet.write("rules.py", "def rules(request):\n    return 'an answer'\n")
    stepfleet.questions(*[f"question {n}" for n in range(12)])
    options = ("--simulate-latency", "0.2-0.3", "--simulate-faults", "0.4")

    done = stepfleet(*RUN, *options, "--out", "out.jsonl", "--json")

    assert done.returncode in (0, 1), done.stderr
    lines = stepfleet.lines("out.jsonl")
    answered = [step for line in lines for step in line["steps"] if step["type"] != "error"]
    assert answered
    assert all(step["duration_ms"] >= 200 for step in answered)
    assert any(line["lost_attempts"] for line in lines)


def test_a_run_brings_its_own_agent_to_a_redis_whose_workers_lack_it(
    stepfleet: CommandLine, redis_url: str
) -> None:
    """They are warned of, since they would take steps that they cannot do."""
    with short_folder() as folder:
        others = CommandLine(folder)
        others.write("agents.py", OTHER_AGENTS)
        try:
            worker = others.start(
                "worker", "-A", "agents.py", STEPFLEET_REDIS_URL=redis_url, STEPFLEET_LEASE="600"
            )
            others.until_said("ready.", within=LONG)
            with Fleet(redis_url) as fleet:
                wait_until(lambda: fleet.overview().workers, within=LONG, what="the other worker")
            # It counts as alive for half a lease, longer than this test may last.
            freeze(worker.pid)
            stepfleet.questions("one")
            without = stepfleet(
                *RUN, "--workers", "0", STEPFLEET_REDIS_URL=redis_url, STEPFLEET_LEASE="600"
            )
            done = stepfleet(
                *RUN, "--out", "out.jsonl", STEPFLEET_REDIS_URL=redis_url, STEPFLEET_LEASE="600"
            )
        finally:
            others.end()

    assert without.returncode == 2
    assert "no running worker has agent 'solver'" in without.stderr
    assert done.returncode == 0, done.stderr
    assert "have no agent 'solver'" in done.stderr
    assert [line["id"] for line in stepfleet.lines("out.jsonl")] == ["q0"]


OTHER_AGENTS = """\
from stepfleet.orchestrator.agents.agent import Agent

painter = Agent("painter", model="openai:gpt-4o-mini")
"""
