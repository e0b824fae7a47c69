"""`stepfleet run` from a bare folder: private Redis, real workers, simulated models."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator

import orjson
import psutil
import pyarrow.parquet as pq
import pytest
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, free_port, short_folder
from support.workers.busy_runs import NO_LIMITS
from support.workers.command_line import RULES, CommandLine

LONG = 60.0
# Looks something up again and again until the test has struck; then everything is answered.
UNTIL_STRUCK = """\
from pathlib import Path

from stepfleet.worker.testing import Reply, ToolCallReply


def rules(request):
    if "quick" in request.question or Path("struck").exists():
        return Reply("answer", latency=0.01)
    return Reply(tool_calls=(ToolCallReply("look", {"what": "more"}),), latency=0.3)
"""
Finished = tuple[CommandLine, subprocess.CompletedProcess[str]]
RUN = ("run", "questions.jsonl", "--agents", "agents.py", "--simulate", "rules.py:rules")


@pytest.fixture
def stepfleet() -> Iterator[CommandLine]:
    with short_folder() as folder:
        commands = CommandLine(folder)
        try:
            yield commands
        finally:
            commands.end()


def ids(stepfleet: CommandLine, name: str = "out.jsonl") -> list[str]:
    return [line["id"] for line in stepfleet.lines(name)]


def endless(stepfleet: CommandLine, *inputs: str) -> None:
    """Write questions whose runs have no end of their own, and rules that end them when struck."""
    stepfleet.write("rules.py", UNTIL_STRUCK)
    lines = [
        orjson.dumps({"id": f"q{n}", "input": text, "overrides": NO_LIMITS})
        for n, text in enumerate(inputs)
    ]
    stepfleet.write("questions.jsonl", b"\n".join(lines).decode() + "\n")


def workers(stepfleet: CommandLine) -> list[psutil.Process]:
    return stepfleet.running("stepfleet.worker")


@pytest.fixture(scope="module")
def finished() -> Iterator[Finished]:
    """A folder in which a batch has been run, and what that said; tests leave it finished."""
    yield from after_a_run("one", "two", "three")


@pytest.fixture(scope="module")
def failed() -> Iterator[Finished]:
    """The same where not every run completed."""
    yield from after_a_run("fine", "broken", "forever")


def after_a_run(*inputs: str) -> Iterator[Finished]:
    with short_folder() as folder:
        commands = CommandLine(folder)
        try:
            commands.questions(*inputs)
            yield commands, commands(*RUN, "--out", "out.jsonl")
        finally:
            commands.end()


def test_one_command_runs_a_batch_without_key_or_network_and_leaves_nothing_behind(
    finished: Finished,
) -> None:
    stepfleet, done = finished
    assert done.returncode == 0, done.stderr
    assert sorted(ids(stepfleet)) == ["q0", "q1", "q2"]
    assert {line["output"] for line in stepfleet.lines("out.jsonl")} == {
        "answer to one",
        "answer to two",
        "answer to three",
    }
    assert "completed" in done.stdout
    assert "3/3 done" in done.stderr
    assert "Traceback" not in done.stderr
    stepfleet.until_all_ended(within=LONG)


def test_the_commands_that_a_run_names_at_its_end_show_its_runs_and_short_results(
    finished: Finished,
) -> None:
    stepfleet, done = finished
    short = stepfleet(*named_after("Short: ", done)).stdout.splitlines()
    assert {"id": "q0", "output": "answer to one"} in map(orjson.loads, short)
    listed = stepfleet(*named_after("The ids: ", done)).stdout
    assert all(one in listed for one in ("q0", "q1", "q2"))
    assert "answer to one" in stepfleet("show", "q0").stdout


def named_after(words: str, done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the arguments of the command that a line of a run's notices names at its end."""
    (line,) = (line for line in done.stderr.splitlines() if words in line)
    return line.partition(f"{words}stepfleet ")[2].split()


def test_the_private_folder_is_its_owners_only_and_hidden_from_git(finished: Finished) -> None:
    folder = finished[0].folder / ".stepfleet"
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / ".gitignore").read_text() == "*\n"


def test_a_batch_that_is_done_is_not_done_again_while_its_results_exist(
    finished: Finished,
) -> None:
    stepfleet, _ = finished
    before = (stepfleet.folder / "out.jsonl").read_bytes()

    again = stepfleet(*RUN, "--out", "out.jsonl")

    assert again.returncode == 0, again.stderr
    assert (stepfleet.folder / "out.jsonl").read_bytes() == before


def test_results_of_another_batch_are_not_mixed_up(finished: Finished) -> None:
    stepfleet, _ = finished
    stepfleet.questions("another", name="others.jsonl")

    done = stepfleet("run", "others.jsonl", *RUN[2:], "--out", "out.jsonl")

    assert done.returncode == 2
    assert "not of this batch" in done.stderr


def test_a_batch_that_is_done_is_begun_anew_on_purpose_only(finished: Finished) -> None:
    """And the summary as JSON has the totals."""
    stepfleet, _ = finished
    before = {line["run_id"] for line in stepfleet.lines("out.jsonl")}
    elsewhere = stepfleet(*RUN, "--out", "other.jsonl")
    assert elsewhere.returncode == 2
    assert "--out other.jsonl. A second batch, paid again: --again" in elsewhere.stderr
    (stepfleet.folder / "out.jsonl").unlink()

    once_more = stepfleet(*RUN)

    assert once_more.returncode == 0, once_more.stderr
    assert "a new batch, paid again: --again" in once_more.stderr
    assert {line["run_id"] for line in stepfleet.lines("out.jsonl")} == before
    (stepfleet.folder / "out.jsonl").unlink()

    done = stepfleet(*RUN, "--out", "out.jsonl", "--json", "--again")

    assert done.returncode == 0, done.stderr
    after = {line["run_id"] for line in stepfleet.lines("out.jsonl")}
    assert len(after) == 3
    assert not after & before
    assert '"completed": 3' in done.stdout
    assert '"steps": 9' in done.stdout


def test_runs_that_do_not_complete_give_exit_code_1_and_say_what_to_do_next(
    failed: Finished,
) -> None:
    stepfleet, done = failed
    assert done.returncode == 1, done.stderr
    reasons = {line["id"]: line["stop_reason"] for line in stepfleet.lines("out.jsonl")}
    assert reasons == {"q0": "completed", "q1": "error", "q2": "steps_limit"}
    assert "--out out.jsonl --retry-failed" in done.stderr


def test_a_run_can_be_explained_after_its_fleet_has_gone(failed: Finished) -> None:
    """CONT-28: from another process, after the run."""
    stepfleet, _ = failed
    (run_id,) = [one["run_id"] for one in stepfleet.lines("out.jsonl") if one["id"] == "q2"]

    done = stepfleet("explain", run_id)

    assert done.returncode == 0, done.stderr
    assert "steps_limit" in done.stdout
    assert "→" in done.stdout
    stepfleet.until_all_ended(within=LONG)


def test_openai_batch_lines_on_standard_input_are_answered_in_kind(
    stepfleet: CommandLine,
) -> None:
    body = '{"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "hello"}]}'
    line = f'{{"custom_id": "c1", "method": "POST", "url": "/v1/chat/completions", "body": {body}}}'
    stepfleet.write("in", line + "\n")

    done = stepfleet("run", "-", *RUN[2:], "--out", "out.jsonl", feed="in")

    assert done.returncode == 0, done.stderr
    (answer,) = stepfleet.lines("out.jsonl")
    assert answer["custom_id"] == "c1"
    assert answer["response"]["status_code"] == 200


def test_interrupted_once_it_stops_cleanly_and_the_same_command_goes_on(
    stepfleet: CommandLine,
) -> None:
    names = [f"q{n}" for n in range(12)]
    stepfleet.questions(*(["quick"] * 4 + ["slow hang"] * 8))
    # More slots than runs that hang, or these hold up the quick ones on a slow machine.
    started = stepfleet.start(*RUN, "--out", "out.jsonl", "--slots", "9")
    wait_until(lambda: len(ids(stepfleet)) >= 4, within=60, what="first results")
    before = (stepfleet.folder / "out.jsonl").read_bytes()

    started.send_signal(signal.SIGINT)

    assert started.wait(timeout=LONG) == 130, stepfleet.said
    assert "same command resumes the batch" in stepfleet.said
    assert "Traceback" not in stepfleet.said
    stepfleet.until_all_ended(within=LONG)

    after_a_correction(stepfleet, left_open=8)
    done = stepfleet(*RUN, "--out", "out.jsonl", within=90)

    assert done.returncode == 0, done.stderr
    assert "Resuming batch" in done.stderr
    assert (stepfleet.folder / "out.jsonl").read_bytes().startswith(before)
    assert sorted(ids(stepfleet)) == sorted(names)


def test_interrupted_twice_it_ends_at_once(stepfleet: CommandLine) -> None:
    stepfleet.write("rules.py", RULES.replace("60.0", "600.0"))
    stepfleet.questions("hang")
    started = stepfleet.start(*RUN, STEPFLEET_DRAIN="600")
    stepfleet.until_said("1 in progress", within=LONG)

    started.send_signal(signal.SIGINT)
    stepfleet.until_said("Ctrl-C again ends at once", within=LONG)
    started.send_signal(signal.SIGINT)

    assert started.wait(timeout=LONG) == 130
    stepfleet.until_all_ended(within=LONG)


def test_killed_it_takes_everything_along_and_the_same_command_goes_on(
    stepfleet: CommandLine,
) -> None:
    stepfleet.questions("quick", "quick", "slow hang")
    started = stepfleet.start(*RUN, "--out", "out.jsonl")
    wait_until(lambda: len(ids(stepfleet)) == 2, within=60, what="first results")

    started.kill()
    started.wait()

    stepfleet.until_all_ended(within=LONG)
    resume = after_a_correction(stepfleet, left_open=1)
    done = stepfleet(*resume, within=90)
    assert done.returncode == 0, done.stderr
    assert sorted(ids(stepfleet)) == ["q0", "q1", "q2"]


def after_a_correction(stepfleet: CommandLine, *, left_open: int) -> list[str]:
    """Run another file with another prompt: the batch before is named, and none of it is run.

    Returns the command that resumes it, by which no run takes long any more.
    """
    rules = (stepfleet.folder / "rules.py").read_text().replace("60.0", "0.01")
    stepfleet.write("rules.py", rules)
    agents = (stepfleet.folder / "agents.py").read_text()
    stepfleet.write("agents.py", agents.replace("be brief", "be long"))
    stepfleet.questions("one", name="small.jsonl")
    done = stepfleet("run", "small.jsonl", *RUN[2:])
    stepfleet.write("agents.py", agents)
    assert done.returncode == 0, done.stderr
    assert "paused, this command does not run them" in done.stderr
    assert f"questions.jsonl: {left_open} of" in done.stderr
    small, before = orjson.loads(stepfleet("status", "--json").stdout)["batches"]
    assert (small["completed"], before["paused"]) == (1, left_open)
    assert before["batch_id"] in done.stderr
    (resume,) = (line for line in done.stderr.splitlines() if "resume: " in line)
    return resume.partition("stepfleet ")[2].split()


def test_a_second_terminal_learns_who_runs_the_file_and_writes_the_results(
    stepfleet: CommandLine,
) -> None:
    endless(stepfleet, "quick", "one")
    started = stepfleet.start(*RUN, "--out", "out.jsonl")
    wait_until(lambda: len(ids(stepfleet)) == 1, within=60, what="a first result")
    stepfleet.questions("other", name="other.jsonl")

    same = stepfleet(*RUN, "--out", "out.jsonl")
    elsewhere = stepfleet(*RUN, "--out", "elsewhere.jsonl")
    mixed = stepfleet("run", "other.jsonl", *RUN[2:], "--out", "out.jsonl")
    (batch,) = orjson.loads(stepfleet("status", "--json").stdout)["batches"]
    over = stepfleet("results", batch["batch_id"], "--out", "out.jsonl")
    stepfleet.write("struck", "")

    assert started.wait(timeout=60) == 0, stepfleet.said
    for refused in (same, elsewhere):
        assert refused.returncode == 2
        assert f"process {started.pid} already runs batch {batch['batch_id']}" in refused.stderr
        assert f"stepfleet results {batch['batch_id']} --out" in refused.stderr
    for refused in (mixed, over):
        assert refused.returncode == 2
        assert f"--out out.jsonl: process {started.pid} is writing it" in refused.stderr
    assert ids(stepfleet) == ["q0", "q1"]


def test_workers_that_cannot_load_their_agents_are_not_started_again(
    stepfleet: CommandLine,
) -> None:
    agents = (stepfleet.folder / "agents.py").read_text()
    here = (
        "import sys\n\nif 'stepfleet.worker.app' in sys.modules:\n    raise OSError('no prices')\n"
    )
    stepfleet.write("agents.py", agents + here)
    stepfleet.questions("fine")
    done = stepfleet(*RUN)
    assert done.returncode == 2
    assert "worker-1 ended right after its start (ended with exit code 2)" in done.stderr
    assert "OSError: no prices" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_failed_is_retried_by_the_command_that_was_advised(stepfleet: CommandLine) -> None:
    stepfleet.questions("fine", "broken")
    first = stepfleet(*RUN)
    assert first.returncode == 1, first.stderr
    assert "Results: stepfleet results " in first.stderr

    done = retried_after_a_repair(stepfleet, first)

    assert "1 runs of batch" in done.stderr
    assert orjson.loads(done.stdout)["completed"] == 2


def retried_after_a_repair(
    stepfleet: CommandLine, first: subprocess.CompletedProcess[str]
) -> subprocess.CompletedProcess[str]:
    """Mend agents and rules, and run the command that `first` advised."""
    agents = (stepfleet.folder / "agents.py").read_text()
    stepfleet.write("agents.py", agents.replace('raise ValueError(f"cannot {what}")', "return ''"))
    rules = (stepfleet.folder / "rules.py").read_text()
    stepfleet.write("rules.py", rules.replace('"broken" in question', "False"))
    (advised,) = (line for line in first.stderr.splitlines() if "--retry-failed" in line)
    done = stepfleet(*advised.partition("Again: stepfleet ")[2].split(), "--json")
    assert done.returncode == 0, done.stderr
    return done


def test_a_table_is_what_its_batch_is_also_after_a_retry(stepfleet: CommandLine) -> None:
    stepfleet.questions("broken", "fine")
    table = ("--out", "out.parquet", "--fields", "id,status,output,last_error.tool_name")
    first = stepfleet(*RUN, *table)
    assert first.returncode == 1, first.stderr
    rows = pq.read_table(stepfleet.folder / "out.parquet").to_pylist()
    assert [(row["id"], row["status"]) for row in rows] == [("q0", "error"), ("q1", "completed")]
    assert rows[0]["last_error.tool_name"] == "broken"

    retried_after_a_repair(stepfleet, first)

    rows = pq.read_table(stepfleet.folder / "out.parquet").to_pylist()
    assert [(row["id"], row["status"]) for row in rows] == [
        ("q0", "completed"),
        ("q1", "completed"),
    ]
    assert rows[1]["output"] == "answer to fine"


def test_a_worker_that_is_killed_is_noticed_and_replaced(stepfleet: CommandLine) -> None:
    endless(stepfleet, "quick", "one", "two")
    started = stepfleet.start(*RUN, "--out", "out.jsonl", "--slots", "1")
    wait_until(lambda: len(ids(stepfleet)) >= 1, within=60, what="a first result")

    for process in workers(stepfleet):
        os.kill(process.pid, signal.SIGKILL)
    stepfleet.write("struck", "")

    assert started.wait(timeout=60) == 0, stepfleet.said
    assert "was killed by signal 9; restarting it" in stepfleet.said
    assert sorted(ids(stepfleet)) == ["q0", "q1", "q2"]


def test_a_private_redis_that_is_killed_is_started_again_and_the_run_goes_on(
    stepfleet: CommandLine,
) -> None:
    endless(stepfleet, "quick", "one", "two")
    started = stepfleet.start(*RUN, "--out", "out.jsonl")
    wait_until(lambda: len(ids(stepfleet)) >= 1, within=60, what="a first result")
    (server,) = (one for one in stepfleet.processes() if one.name().startswith(("redis", "valkey")))

    server.kill()
    stepfleet.until_said("The private Redis is back", within=LONG)
    stepfleet.write("struck", "")

    assert started.wait(timeout=60) == 0, stepfleet.said
    assert "The private Redis has died; starting it again" in stepfleet.said
    assert sorted(ids(stepfleet)) == ["q0", "q1", "q2"]
    stepfleet.until_all_ended(within=LONG)


def test_several_workers_share_a_batch(stepfleet: CommandLine) -> None:
    endless(stepfleet, *["endless"] * 8)
    started = stepfleet.start(*RUN, "--out", "out.jsonl", "--workers", "2", "--slots", "2")

    def at_work() -> list[str]:
        told = orjson.loads(stepfleet("status", "--json").stdout or "{}")
        return [one["name"] for one in told.get("fleet", {}).get("workers", ()) if one["held"]]

    wait_until(lambda: len(at_work()) == 2, within=LONG, what="two workers at work")
    stepfleet.write("struck", "")

    assert started.wait(timeout=60) == 0, stepfleet.said
    seen = {step["worker"] for line in stepfleet.lines("out.jsonl") for step in line["steps"]}
    assert len(seen) == 2


def test_an_agent_module_that_breaks_on_workers_only_is_reported_with_the_end_of_their_log(
    stepfleet: CommandLine,
) -> None:
    stepfleet.questions("one")
    agents = (stepfleet.folder / "agents.py").read_text()
    is_worker = "sys.argv[0].endswith('worker/__main__.py')"
    only_there = f"import sys\nif {is_worker}: raise RuntimeError('only on workers')\n"
    stepfleet.write("agents.py", only_there + agents)

    done = stepfleet(*RUN)

    assert done.returncode == 2, done.stderr
    assert "only on workers" in done.stderr


def test_a_batch_runs_on_the_redis_that_the_environment_names(
    stepfleet: CommandLine, redis_url: str
) -> None:
    stepfleet.questions("one")

    done = stepfleet(*RUN, STEPFLEET_REDIS_URL=redis_url)

    assert done.returncode == 0, done.stderr
    assert not (stepfleet.folder / ".stepfleet" / "address.json").exists()


def test_a_redis_without_its_append_only_file_is_warned_of_loudly(
    stepfleet: CommandLine, own_redis: Callable[..., RedisServer]
) -> None:
    stepfleet.questions("one")
    server = own_redis(appendonly="no")

    done = stepfleet(*RUN, STEPFLEET_REDIS_URL=server.url)

    assert done.returncode == 0, done.stderr
    assert "WARNING: Redis has its append-only file off" in done.stderr


@contextlib.contextmanager
def dead_port() -> Iterator[int]:
    """A port on which nobody listens, and that nobody else can take meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        yield int(taken.getsockname()[1])


BAD_AGENTS = {
    "syntax": "def f(:\n",
    "hints": ("from stepfleet.orchestrator.tools import tool\n@tool\ndef add(a, b):\n    'Add.'\n"),
}
TWO = '{"id": "a", "input": "x"}\n'


@pytest.mark.parametrize(
    ("files", "arguments", "said"),
    [
        ({}, ("run", "nowhere.jsonl", *RUN[2:]), "nowhere.jsonl"),
        ({"questions.jsonl": "not json\n"}, RUN, "line 1"),
        ({"questions.jsonl": TWO + '{"id": "b"}\n'}, RUN, "line 2"),
        ({"questions.jsonl": TWO + '{"id": "b", "inputs": "x"}\n'}, RUN, "'inputs'"),
        ({"questions.jsonl": TWO + TWO}, RUN, "'a'"),
        ({"questions.jsonl": '{"input": "x", "agent": "painter"}\n'}, RUN, "painter"),
        ({"questions.jsonl": ""}, RUN, "questions.jsonl"),
        ({"agents.py": BAD_AGENTS["syntax"]}, RUN, "agents.py, line 1: SyntaxError"),
        ({"agents.py": BAD_AGENTS["hints"]}, RUN, "hint"),
        ({}, (*RUN, "--agent", "painter"), "--agent painter: no such agent"),
        ({}, (*RUN, "--out", "nowhere/out.jsonl"), "--out nowhere/out.jsonl cannot be written"),
        ({}, RUN[:4], "OPENAI_API_KEY is not set"),
        ({}, (*RUN[:4], "--simulate", "nowhere.py:rules"), "nowhere.py"),
        ({}, (*RUN[:4], "--simulate", ""), "'' names no"),
        ({}, (*RUN[:4], "--simulate", "rules.py:nope"), "nope"),
        ({}, (*RUN, "--simulate-latency", "soon"), "is not a latency"),
        ({}, (*RUN, "--simulate-faults", "2"), "--simulate-faults"),
        ({}, (*RUN[:4], "--simulate-faults", "0.1"), "needs --simulate RULES"),
        ({}, ("run", "questions.jsonl"), "--agents"),
        ({}, ("run", *RUN[2:]), "name a FILE of inputs, or --batch ID"),
        ({}, (*RUN, "--again", "--retry-failed"), "--again begins a new batch"),
        ({}, (*RUN, "--raise", "max_steps=9"), "--raise needs --retry-failed"),
        ({}, (*RUN, "--retry-failed"), "no batch here has run this file"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_submitted(
    stepfleet: CommandLine, files: dict[str, str], arguments: tuple[str, ...], said: str
) -> None:
    stepfleet.questions("one")
    for name, text in files.items():
        stepfleet.write(name, text)

    done = stepfleet(*arguments, STEPFLEET_NO_CHECK="0")

    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    stepfleet.until_all_ended(within=LONG)
    # Most of it is found before there is any Redis; what is found later has submitted nothing.
    if (stepfleet.folder / ".stepfleet" / "address.json").exists():
        assert orjson.loads(stepfleet("status", "--json").stdout)["batches"] == []


def test_a_full_disk_is_reported_and_what_was_done_is_not_lost(stepfleet: CommandLine) -> None:
    stepfleet.questions("one")

    done = stepfleet(*RUN, "--out", "/dev/full")

    assert done.returncode == 2
    assert "cannot be written: No space left" in done.stderr
    assert "Traceback" not in done.stderr
    stepfleet.until_all_ended(within=LONG)


def test_bad_lines_are_left_out_when_asked_for(stepfleet: CommandLine) -> None:
    stepfleet.write("questions.jsonl", TWO + "not json\n" + '{"id": "c", "input": "y"}\n')

    done = stepfleet(*RUN, "--out", "out.jsonl", "--skip-invalid")

    assert done.returncode == 0, done.stderr
    assert sorted(ids(stepfleet)) == ["a", "c"]


@pytest.mark.parametrize("host", ["redis://127.0.0.1:{port}/0", "redis://:pw@127.0.0.1:{port}/0"])
def test_a_redis_that_cannot_be_reached_is_one_message_without_the_password(
    stepfleet: CommandLine, host: str
) -> None:
    stepfleet.questions("one")

    with dead_port() as port:
        url = host.format(port=port)
        done = stepfleet(*RUN, STEPFLEET_REDIS_URL=url, STEPFLEET_PATIENCE="0.5")

    assert done.returncode == 2
    assert "cannot be reached" in done.stderr
    assert "pw" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_redis_that_refuses_the_password_is_one_message_without_it(
    stepfleet: CommandLine, own_redis: Callable[..., RedisServer]
) -> None:
    stepfleet.questions("one")
    server = own_redis(requirepass="right")
    url = server.url.replace("redis://", "redis://:wrong@")

    done = stepfleet(*RUN, STEPFLEET_REDIS_URL=url)

    assert done.returncode == 2
    assert "refuses the credentials" in done.stderr
    assert "wrong@" not in done.stderr


def test_an_endpoint_where_nobody_listens_is_reported_before_anything_is_submitted(
    stepfleet: CommandLine,
) -> None:
    stepfleet.questions("one")

    with dead_port() as port:
        done = stepfleet(
            *RUN[:4], OPENAI_BASE_URL=f"http://127.0.0.1:{port}/v1", STEPFLEET_NO_CHECK="0"
        )

    assert done.returncode == 2
    assert "cannot be reached" in done.stderr
