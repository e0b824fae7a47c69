"""A standing fleet, and the commands that use it from other terminals."""

import os
import signal
import stat
from collections.abc import Iterator

import orjson
import pytest
from support.deadlines import wait_until
from support.servers.redis_servers import short_folder
from support.workers.busy_runs import NO_LIMITS
from support.workers.command_line import RULES, CommandLine

LONG = 60.0
UP = ("up", "--agents", "agents.py", "--simulate", "rules.py:rules")


@pytest.fixture(scope="module")
def fleet() -> Iterator[CommandLine]:
    """A folder in which `stepfleet up` runs."""
    with short_folder() as folder:
        # A worker counts as alive for half a lease after it has told of itself.
        commands = CommandLine(folder, STEPFLEET_LEASE="60")
        commands.write("rules.py", RULES.replace("60.0", "600.0"))
        try:
            commands.start(*UP)
            commands.until_said("Ctrl-C stops it", within=LONG)
            # It says so when its workers have announced their agents.
            assert "alive" in commands("status").stdout
            yield commands
        finally:
            commands.end()


def submitted(fleet: CommandLine, *inputs: str, options: tuple[str, ...] = ()) -> str:
    """Submit questions and return the batch's id."""
    name = fleet.questions(*inputs)
    done = fleet("submit", name, "--agent", "solver", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def endless(fleet: CommandLine, *inputs: str) -> str:
    """Submit questions whose runs only a cancel ends, if their answers are never one."""
    lines = [
        orjson.dumps({"id": f"q{n}", "input": text, "overrides": NO_LIMITS})
        for n, text in enumerate(inputs)
    ]
    fleet.write("endless.jsonl", b"\n".join(lines).decode() + "\n")
    done = fleet("submit", "endless.jsonl", "--agent", "solver")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def runs_of(fleet: CommandLine, batch: str, *options: str) -> dict[str, dict[str, object]]:
    """Return the results of a batch by line id."""
    done = fleet("results", batch, *options)
    assert done.returncode == 0, done.stderr
    lines = [orjson.loads(line) for line in done.stdout.splitlines()]
    return {line["id"]: line for line in lines}


def run_id_of(fleet: CommandLine, batch: str, line_id: str = "q0") -> str:
    return str(runs_of(fleet, batch, "--wait")[line_id]["run_id"])


def test_a_batch_is_submitted_watched_and_read_from_other_terminals(fleet: CommandLine) -> None:
    batch = submitted(fleet, "first a", "first b")

    watched = fleet("watch", batch)

    assert watched.returncode == 0, watched.stderr
    assert "2/2 done" in watched.stderr
    status = fleet("status", batch, "--json")
    assert orjson.loads(status.stdout)["completed"] == 2
    assert runs_of(fleet, batch)["q0"]["output"] == "answer to first a"


def test_submit_can_wait_and_write_results_at_once(fleet: CommandLine) -> None:
    name = fleet.questions("waiting", "waiting forever")

    done = fleet("submit", name, "--agent", "solver", "--wait", "--out", "waited.jsonl")

    assert done.returncode == 1, done.stderr
    assert {line["stop_reason"] for line in fleet.lines("waited.jsonl")} == {
        "completed",
        "steps_limit",
    }


def test_the_same_idempotency_key_is_the_same_batch(fleet: CommandLine) -> None:
    options = ("--idempotency-key", "monday")

    first = submitted(fleet, "key", options=options)

    assert submitted(fleet, "key", options=options) == first


def test_a_question_is_answered_on_standard_output_by_the_workers_that_are_there(
    fleet: CommandLine,
) -> None:
    fleet.write("question", "and this?\n")

    answered = fleet("ask", "solver", "what is it?")
    piped = fleet("ask", "solver", "-", feed="question")
    failed = fleet("ask", "solver", "forever")
    unknown = fleet("ask", "painter", "what?")

    assert (answered.returncode, answered.stdout) == (0, "answer to what is it?\n")
    assert (piped.stdout, piped.stderr) == ("answer to and this?\n", "")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "solver did not complete (steps_limit)" in failed.stderr
    assert "stepfleet explain " in failed.stderr
    assert unknown.returncode == 2
    assert "painter" in unknown.stderr


def test_a_file_that_was_submitted_is_not_submitted_again_in_silence(fleet: CommandLine) -> None:
    first = submitted(fleet, "only once")

    again = fleet("submit", "questions.jsonl", "--agent", "solver")
    as_data = fleet("submit", "questions.jsonl", "--agent", "solver", "--json")
    another = fleet("submit", "questions.jsonl", "--agent", "solver", "--again")

    assert again.stdout.strip() == first
    assert f"Nothing was submitted: batch {first}" in again.stderr
    assert f"stepfleet results {first}" in again.stderr
    told = orjson.loads(as_data.stdout)
    assert (told["batch_id"], told["is_new"]) == (first, False)
    assert another.returncode == 0, another.stderr
    assert another.stdout.strip() != first
    assert not another.stderr


def test_results_are_replaced_as_a_whole_and_in_input_order(fleet: CommandLine) -> None:
    batch = submitted(fleet, "slow ordered", "ordered", "ordered broken")
    fleet.write("ordered.jsonl", "something old\n")

    done = fleet("results", batch, "--out", "ordered.jsonl", "--ordered", "--wait")

    assert done.returncode == 0, done.stderr
    assert [line["id"] for line in fleet.lines("ordered.jsonl")] == ["q0", "q1", "q2"]
    printed = fleet("results", batch, "--out", "-", "--ordered")
    assert [orjson.loads(one)["id"] for one in printed.stdout.splitlines()] == ["q0", "q1", "q2"]
    assert not (fleet.folder / "-").exists()
    assert set(runs_of(fleet, batch, "--failed")) == {"q2"}


def test_show_prints_the_trace_of_a_run(fleet: CommandLine) -> None:
    run = run_id_of(fleet, submitted(fleet, "trace me"))

    shown = fleet("show", run)

    assert shown.returncode == 0, shown.stderr
    for part in ("trace me", "step 1", 'look({"what":"1"})', "seen 1", "answer to trace me"):
        assert part in shown.stdout
    assert orjson.loads(fleet("show", run, "--json").stdout)["steps_used"] == 3


def test_events_are_lines_of_json_without_gaps(fleet: CommandLine) -> None:
    run = run_id_of(fleet, submitted(fleet, "tell events"))

    done = fleet("events", run, "--follow")

    told = [orjson.loads(line) for line in done.stdout.splitlines()]
    assert [event["sequence"] for event in told] == list(range(1, len(told) + 1))
    assert told[-1]["payload"]["status"] == "completed"


def test_explain_names_the_criterion_that_stopped_the_run(fleet: CommandLine) -> None:
    """CONT-28"""
    run = run_id_of(fleet, submitted(fleet, "explain forever"))

    told = orjson.loads(fleet("explain", run, "--json").stdout)

    (decisive,) = [one for one in told["criteria"] if one["decisive"]]
    assert told["stop_reason"] == decisive["stop_reason"] == "steps_limit"
    assert 4 in decisive["numbers"].values()


def test_an_active_run_is_explained_and_then_cancelled_and_explained_again(
    fleet: CommandLine,
) -> None:
    batch = submitted(fleet, "hang here")
    status = ("status", batch, "--json")
    wait_until(
        lambda: orjson.loads(fleet(*status).stdout)["steps"] == 1, within=LONG, what="a first step"
    )
    (run,) = fleet_runs(fleet, batch)

    active = fleet("explain", run)
    cancelled = fleet("cancel", run)

    assert "continues after its newest step" in active.stdout, active.stderr
    assert cancelled.returncode == 0, cancelled.stderr
    assert fleet("watch", batch).returncode == 1
    assert "user_requested" in fleet("explain", run).stdout


def fleet_runs(fleet: CommandLine, batch: str) -> list[str]:
    """Return the ids of a batch's runs, ended or not, by the tool's own event lines."""
    # A run's id follows from its batch and row; `results --ordered` would wait for the end.
    from stepfleet.orchestrator.store.batches.batches import run_id_of as id_of  # noqa: PLC0415

    total = orjson.loads(fleet("status", batch, "--json").stdout)["total"]
    return [str(id_of(batch, row)) for row in range(total)]


def test_a_batch_is_paused_resumed_and_cancelled(fleet: CommandLine) -> None:
    batch = endless(fleet, *["linger forever, to be paused"] * 3)

    assert fleet("pause", "--batch", batch).returncode == 0
    wait_until(
        lambda: orjson.loads(fleet("status", batch, "--json").stdout)["paused"] == 3,
        within=LONG,
        what="three paused runs",
    )
    assert fleet("resume", "--batch", batch).returncode == 0
    assert orjson.loads(fleet("status", batch, "--json").stdout)["paused"] == 0
    assert fleet("cancel", "--batch", batch).returncode == 0
    fleet("watch", batch)
    assert orjson.loads(fleet("status", batch, "--json").stdout)["cancelled"] == 3


def test_a_line_of_a_batch_names_its_run_where_runs_are_steered(fleet: CommandLine) -> None:
    batch = endless(fleet, *["linger forever, by its line"] * 2)
    run, _ = fleet_runs(fleet, batch)

    for word in ("pause", "resume", "cancel"):
        done = fleet(word, "q0", "--batch", batch)
        assert done.returncode == 0, done.stderr
        assert f"Run {run} " in done.stdout

    assert fleet("cancel", "--batch", batch).returncode == 0
    fleet("watch", batch)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("send", "q0", "and this?"), "Run {run} has the message"),
        (("fork", "q0", "--at", "1"), "-"),
        (("events", "q0"), "{run}"),
        (("compare", "q0", "q1", "--json"), "{run}"),
        (("checkpoints", "snapshot", "q0"), "{run}"),
        (("checkpoints", "write", "q0", "--out", "line.json"), "{run}"),
    ],
)
def test_a_line_of_a_batch_names_its_ended_run(
    fleet: CommandLine, command: tuple[str, ...], told: str
) -> None:
    batch = submitted(fleet, f"{command[0]} a", f"{command[0]} b", options=("--again",))
    fleet("watch", batch)

    done = fleet(*command, "--batch", batch)

    assert done.returncode == 0, done.stderr
    assert told.format(run=fleet_runs(fleet, batch)[0]) in done.stdout + done.stderr


def test_failed_runs_of_a_batch_are_retried_with_a_raised_limit(fleet: CommandLine) -> None:
    batch = submitted(fleet, "retry forever", "retry fine")
    assert fleet("watch", batch).returncode == 1

    done = fleet("retry", "--batch", batch, "--failed", "--raise", "max_steps=6")

    assert done.returncode == 0, done.stderr
    assert "retry of 1 run" in done.stdout
    fleet("watch", batch)
    runs = runs_of(fleet, batch)
    assert runs["q0"]["steps_used"] == 6
    assert runs["q1"]["steps_used"] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("status", "no-such-batch"), "no-such-batch"),
        (("watch", "no-such-batch"), "no-such-batch"),
        (("results", "no-such-batch"), "no-such-batch"),
        (("show", "no-such-run"), "no-such-run"),
        (("explain", "no-such-run"), "no-such-run"),
        (("events", "no-such-run"), "no-such-run"),
        (("retry", "--batch", "b"), "--failed"),
        (("retry", "r", "--raise", "max_steps"), "FIELD=VALUE"),
        (("cancel",), "--batch"),
        (("submit", "nowhere.jsonl", "--agent", "solver"), "nowhere.jsonl"),
        (("submit", "questions.jsonl", "--agent", "painter"), "painter"),
        (("submit", "questions.jsonl", "--agent", "solver", "--out", "x"), "--wait"),
        (("submit", "questions.jsonl", "--agent", "solver", "--wait", "--out", "-"), "--out -"),
        (("run", "questions.jsonl", "--agents", "agents.py", "--out", "-"), "--out -"),
        (("checkpoint", "r", "--out", "-"), "--out -"),
        (
            ("submit", "questions.jsonl", "--again", "--idempotency-key", "x"),
            "--again makes a key of its own",
        ),
        (("results", "b", "--out", "nowhere/x"), "cannot be written"),
    ],
)
def test_what_does_not_exist_is_one_message(
    fleet: CommandLine, arguments: tuple[str, ...], said: str
) -> None:
    fleet.questions("x")

    done = fleet(*arguments)

    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_status_lists_the_fleet_and_its_batches(fleet: CommandLine) -> None:
    batch = submitted(fleet, "list me")

    done = fleet("status")

    assert batch in done.stdout
    assert "alive" in done.stdout
    assert orjson.loads(fleet("status", "--json").stdout)["fleet"]["workers"]


def test_runs_are_listed_by_conditions_page_by_page(fleet: CommandLine) -> None:
    batch = submitted(fleet, "one", "two", "three")
    assert fleet("watch", batch).returncode == 0
    first = fleet("ls", "--batch", batch, "--limit", "2", "--json")
    page = orjson.loads(first.stdout)
    assert len(page["runs"]) == 2
    rest = fleet("ls", "--batch", batch, "--cursor", page["next"], "--json")
    ids = {run["run_id"] for run in [*page["runs"], *orjson.loads(rest.stdout)["runs"]]}
    assert len(ids) == 3
    shown = fleet("ls", "--batch", batch, "--status", "completed").stdout
    assert all(one in shown for one in ids)
    assert "No run matches" in fleet("ls", "--batch", batch, "--status", "failed").stdout
    wrong = fleet("ls", "--status", "finished")
    assert wrong.returncode == 2
    assert "write one of queued" in wrong.stderr


def test_status_says_that_the_fleet_is_paused(fleet: CommandLine) -> None:
    assert fleet("pause", "--all").returncode == 0
    try:
        shown = fleet("status").stdout
    finally:
        assert fleet("resume", "--all").returncode == 0

    assert "the fleet is paused: stepfleet resume --all" in shown
    assert "the fleet is paused" not in fleet("status").stdout


def test_the_address_with_its_password_is_in_a_file_of_its_owner_only(fleet: CommandLine) -> None:
    path = fleet.folder / ".stepfleet" / "redis-url"

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() not in fleet.said
    assert f"$(cat {path})" in fleet.said
    elsewhere = fleet("status", "--data", "elsewhere", STEPFLEET_REDIS_URL=path.read_text())
    assert elsewhere.returncode == 0, elsewhere.stderr


def test_doctor_finds_a_sound_fleet_sound(fleet: CommandLine) -> None:
    """The key of its model is where the workers are."""
    done = fleet("doctor", "--json", OPENAI_API_KEY="", OPENAI_BASE_URL="")

    found = {one["check"]: one for one in orjson.loads(done.stdout)}
    for name in ("workers", "agents", "Redis durability", "model of solver"):
        assert found[name]["state"] == "ok"
    assert (
        found["model of solver"]["found"] == "OPENAI_API_KEY is not set here; its workers need it"
    )
    assert done.returncode == 0


def test_doctor_fails_for_a_model_out_of_reach_only_where_its_agent_is_named(
    fleet: CommandLine,
) -> None:
    away = "http://127.0.0.1:1/v1"
    for named, state, code in (((), "warn", 0), (("--agents", "agents.py"), "fail", 2)):
        done = fleet("doctor", "--json", *named, OPENAI_API_KEY="k", OPENAI_BASE_URL=away)
        found = {one["check"]: one["state"] for one in orjson.loads(done.stdout)}
        assert (found["model of solver"], done.returncode) == (state, code)


def test_without_redis_commands_say_how_to_get_one(fleet: CommandLine) -> None:
    done = fleet("status", "--data", "nothing-here")

    assert done.returncode == 2
    assert "stepfleet up" in done.stderr


def test_up_ends_cleanly_on_ctrl_c_and_a_worker_of_its_own_can_join() -> None:
    with short_folder() as folder:
        commands = CommandLine(folder)
        try:
            up = commands.start(*UP)
            commands.until_said("Ctrl-C stops it", within=LONG)
            address = (folder / ".stepfleet" / "redis-url").read_text()
            joined = CommandLine(folder)
            worker = joined.start("worker", "-A", "agents.py", "--slots", "5", "--name", "extra")
            # It says its name before it heeds signals.
            joined.until_said("ready.", within=LONG)
            assert "extra@" in joined.said

            worker.send_signal(signal.SIGTERM)
            assert worker.wait(timeout=LONG) == 0
            os.kill(up.pid, signal.SIGINT)

            assert up.wait(timeout=LONG) == 0
            commands.until_all_ended(within=LONG)
            assert address
            assert not (folder / ".stepfleet" / "redis-url").exists()
        finally:
            commands.end()


def test_a_worker_without_a_fleet_to_join_says_so() -> None:
    with short_folder() as folder:
        done = CommandLine(folder)("worker", "--agents", "agents.py")

        assert done.returncode == 2
        assert "stepfleet up" in done.stderr
