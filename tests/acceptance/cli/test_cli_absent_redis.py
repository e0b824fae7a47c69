"""Commands whose Redis is away: those that wait wait for it too, the others say it in a line."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, free_port
from support.workers.command_line import CommandLine

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.cli.main import build

LONG = 60.0
COMMANDS = {
    "run": ("questions.jsonl", "--agents", "agents.py", "--simulate", "rules.py:rules"),
    "up": ("--agents", "agents.py", "--simulate", "rules.py:rules"),
    "flower": (),
    "scale": (),
    "archive": (),
    "audit": (),
    "ask": ("solver", "hello", "--agents", "agents.py"),
    "submit": ("questions.jsonl", "--agent", "solver"),
    "watch": ("batch",),
    "failures": ("batch",),
    "status": (),
    "workers": (),
    "then": ("batch", "--agent", "solver", "--input", "{output}"),
    "schedule": ("list",),
    "approvals": (),
    "approve": ("run",),
    "deny": ("run", "--reason", "no"),
    "answer": ("run", "yes"),
    "decide": ("run", "--approve"),
    "checkpoints": ("snapshot", "run"),
    "results": ("batch", "--wait"),
    "ls": (),
    "show": ("run", "--follow"),
    "explain": ("run",),
    "events": ("run", "--follow"),
    "checkpoint": ("run", "--out", "kept", "--every", "1", "--follow"),
    "snapshot": ("run",),
    "fork": ("run",),
    "compare": ("run", "other"),
    "cancel": ("batch",),
    "pause": ("batch",),
    "resume": ("batch",),
    "retry": ("batch",),
    "send": ("run", "hello"),
    "cache": ("clear",),
    "costs": (),
    "limits": ("show",),
    "purge": ("--yes",),
}
WITHOUT_A_REDIS = {"restore", "doctor", "keeper", "worker"}
"""`restore` reads its file first; `doctor` prints a table, see below; keepers and workers wait."""
WAITING = {
    "watch": COMMANDS["watch"],
    "results": COMMANDS["results"],
    "show": COMMANDS["show"],
    "events": COMMANDS["events"],
    "checkpoint": COMMANDS["checkpoint"],
}
ABSENT = {
    "server": "redis://:secret-word@127.0.0.1:{port}/0",
    "cluster": "redis+cluster://:secret-word@127.0.0.1:{port}",
    "sentinel": "sentinel://:secret-word@127.0.0.1:{port}/mymaster/0",
}


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[CommandLine]:
    made = CommandLine(tmp_path)
    made.questions("one")
    yield made
    made.end()


def test_every_command_that_needs_a_redis_is_tried() -> None:
    app = typer.main.get_group(build())
    assert set(app.commands) == set(COMMANDS) | WITHOUT_A_REDIS


SOME = ("run", "submit", "watch", "status", "flower")
"""Commands of each group: beyond the address, all read it alike."""


@pytest.mark.parametrize("kind", ABSENT)
def test_an_absent_redis_is_one_line_and_exit_code_2_for_every_command(
    commands: CommandLine, kind: str
) -> None:
    commands = CommandLine(
        commands.folder,
        STEPFLEET_REDIS_URL=ABSENT[kind].format(port=free_port()),
        STEPFLEET_BROKER_URL=f"redis://127.0.0.1:{free_port()}/0",
        STEPFLEET_PATIENCE="0",
    )
    for name in COMMANDS if kind == "server" else SOME:
        done = commands(name, *COMMANDS[name])
        assert done.returncode == 2, (name, done.stderr)
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1, (name, done.stderr)
        assert lines[0].startswith("Error: Redis at ")
        assert "cannot be reached" in lines[0]
        assert "secret-word" not in lines[0]
        assert "<redis" not in lines[0]
    found = commands("doctor")
    assert found.returncode == 2
    assert "cannot be reached" in " ".join(found.stdout.split())
    assert not found.stderr


@pytest.mark.parametrize("name", WAITING)
def test_a_command_that_waits_for_runs_waits_for_a_redis_that_is_away(
    commands: CommandLine, own_redis: Callable[..., RedisServer], name: str
) -> None:
    server = own_redis()
    server.stop()
    waiting = commands.start(
        name, *WAITING[name], STEPFLEET_REDIS_URL=server.url, STEPFLEET_PATIENCE="120"
    )
    wait_until(
        lambda: "retrying for" in commands.said or waiting.poll() is not None,
        within=LONG,
        what="word of the wait",
    )
    assert waiting.poll() is None, commands.said
    server.start()
    assert waiting.wait(LONG) == 2
    assert "cannot be reached; retrying for" in commands.said
    # Which it is: only the batch or the run is missing.
    assert commands.said.splitlines()[-1].startswith("Error: no ")


def test_a_worker_that_starts_before_its_redis_waits_for_it(
    commands: CommandLine, own_redis: Callable[..., RedisServer]
) -> None:
    """OPS-04: a machine that boots, or a cluster whose Redis moves, brings no order with it."""
    server = own_redis()
    server.stop()
    worker = commands.start("worker", "--agents", "agents.py", STEPFLEET_REDIS_URL=server.url)
    wait_until(
        lambda: "waiting for the store" in commands.said or worker.poll() is not None,
        within=LONG,
        what="word of the wait",
    )
    assert worker.poll() is None, commands.said
    server.start()
    with Fleet(server.url) as fleet:
        wait_until(lambda: fleet.overview().workers, within=LONG, what="the worker")
    commands.stop()
    assert worker.wait(LONG) == 0


def test_a_command_that_waits_gives_up_when_its_patience_ends(commands: CommandLine) -> None:
    done = commands(
        "watch",
        "batch",
        STEPFLEET_REDIS_URL=f"redis://127.0.0.1:{free_port()}/0",
        STEPFLEET_PATIENCE="0.3",
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("Error: Redis at ")
