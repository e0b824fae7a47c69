"""`stepfleet flower` beside a working fleet."""

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from flower.urls import handlers as flower_handlers
from support.deadlines import wait_until
from support.servers.flower_site import LONG, Site, started_flower
from support.servers.redis_servers import free_port, short_folder
from support.workers.command_line import CommandLine
from tornado.routing import URLSpec

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

# The tasks are counted: a hint that waits for a busy worker must not be sent once more, and a
# worker that is ended by force tells nobody what became of its last steps.
PATIENT = {"STEPFLEET_LEASE": "600", "STEPFLEET_GRACE": "600", "STEPFLEET_DRAIN": "120"}
RUN = ("run", "questions.jsonl", "--agents", "agents.py", "--simulate", "rules.py:rules")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def commands() -> Iterator[CommandLine]:
    with short_folder() as folder:
        made = CommandLine(folder, **PATIENT)
        try:
            yield made
        finally:
            made.end()


def test_steps_are_shown_by_agent_and_step_with_their_run_and_without_texts(
    commands: CommandLine, redis_url: str
) -> None:
    site = started_flower(commands, redis_url)
    commands.questions("what is PRIVATE-QUESTION")
    wait_until(lambda: site.get("/")[0] == 200, within=LONG, what="Flower's first page")
    site.until_it_hears(redis_url)

    done = subprocess_run(commands, redis_url)

    assert done.returncode == 0, done.stderr
    (result,) = commands.lines("out.jsonl")
    wait_until(
        lambda: [one["state"] for one in site.tasks().values()] == ["SUCCESS"] * 3,
        within=LONG,
        what="three finished steps in Flower",
    )
    tasks = site.tasks()
    assert sorted(one["name"] for one in tasks.values()) == [
        "solver: step 1",
        "solver: step 2",
        "solver: step 3",
    ]
    for uuid, one in tasks.items():
        assert result["run_id"] in one["args"]
        page = site.get(f"/task/{uuid}")[1]
        for secret in ("SECRET-PROMPT", "PRIVATE-QUESTION", "simulated", "flower-secret"):
            assert secret not in page
            assert secret not in str(one)


def test_failures_and_retries_are_shown_as_such(
    commands: CommandLine, redis_url: str, model: ModelServer
) -> None:
    """A call that the provider refuses once is a RETRY, a step that fails a FAILURE; no texts."""
    model.follow(by_question)
    model.fail(Fault("server_error"), key="refused PRIVATE-QUESTION", turn=1, attempt=1)
    site = started_flower(commands, redis_url)
    wait_until(lambda: site.get("/")[0] == 200, within=LONG, what="Flower's first page")
    site.until_it_hears(redis_url)
    commands.questions("refused PRIVATE-QUESTION", "broken PRIVATE-QUESTION")
    done = commands(
        *RUN[:4],
        "--out",
        "out.jsonl",
        within=LONG,
        STEPFLEET_REDIS_URL=redis_url,
        OPENAI_BASE_URL=model.url,
        OPENAI_API_KEY="sk-test-canary",
    )

    assert done.returncode == 1, done.stderr
    runs = {line["id"]: line["run_id"] for line in commands.lines("out.jsonl")}

    def args_of(line_id: str, step: int) -> str:
        return str([runs[line_id], step])

    def shown() -> list[tuple[str, str, str]]:
        return sorted((one["args"], one["name"], one["state"]) for one in site.tasks().values())

    expected = sorted(
        [
            (args_of("q0", 0), "solver: step 1", "RETRY"),
            (args_of("q0", 0), "solver: step 1", "SUCCESS"),
            (args_of("q0", 1), "solver: step 2", "SUCCESS"),
            (args_of("q1", 0), "solver: step 1", "FAILURE"),
        ]
    )

    def settled() -> bool:
        states = [state for _, _, state in shown()]
        return len(states) >= len(expected) and not {"RECEIVED", "STARTED"} & set(states)

    wait_until(settled, within=LONG, what="four ended tasks in Flower")
    assert shown() == expected
    why = {one["state"]: one["exception"] for one in site.tasks().values() if one["exception"]}
    assert why["FAILURE"] == "StepFailed('tool: ValueError: cannot it')"
    assert why["RETRY"].startswith("again in ")
    assert "500" in why["RETRY"]
    pages = [site.get("/tasks")[1], site.get("/api/tasks")[1], site.get("/workers")[1]]
    pages += [site.get(f"/task/{uuid}")[1] for uuid in site.tasks()]
    for secret in ("SECRET-PROMPT", "PRIVATE-QUESTION", "sk-test-canary"):
        assert not any(secret in page for page in pages)


def by_question(request: RequestRecord) -> Reply:
    """Break the tool, or look something up and answer."""
    if "broken" in request.question:
        return Reply(tool_calls=(ToolCallReply("broken", {"what": "it"}),))
    if request.turn == 1:
        return Reply(tool_calls=(ToolCallReply("look", {"what": "it"}),))
    return Reply("answer")


def subprocess_run(commands: CommandLine, redis_url: str) -> "subprocess.CompletedProcess[str]":
    return commands(*RUN, "--out", "out.jsonl", within=LONG, STEPFLEET_REDIS_URL=redis_url)


def test_the_password_of_redis_is_on_no_page(commands: CommandLine, own_redis: Any) -> None:
    server = own_redis(requirepass="redis-secret")
    url = server.url.replace("redis://", "redis://:redis-secret@")
    site = started_flower(commands, url)

    for page in ("/", "/tasks", "/broker", "/workers", "/metrics"):
        assert "redis-secret" not in site.get(page)[1]


def test_with_authentication_nothing_is_shown_to_strangers(
    commands: CommandLine, redis_url: str
) -> None:
    site = started_flower(commands, redis_url)

    assert site.get("/metrics")[0] == 200
    for page in ("/", "/tasks", "/api/tasks", "/broker", "/metrics", "/quarantine"):
        assert site.get(page, auth=None)[0] == 401
        assert site.get(page, auth="me:guess")[0] == 401


# What a browser asks for before it knows the password, and what says no more than "OK".
OPEN = {"/static/(.*)", "/login/?", "/logout", "/healthcheck", ".*"}


def test_with_authentication_every_page_of_flower_asks_for_the_password(
    commands: CommandLine, redis_url: str
) -> None:
    site = started_flower(commands, redis_url)
    for handler in flower_handlers:
        pattern = str(handler.regex.pattern if isinstance(handler, URLSpec) else handler[0])
        pattern = pattern.removesuffix("$")
        if pattern in OPEN:
            continue
        page = re.sub(r"\(.[*+]\)", "x", pattern)
        said = {verb: site.ask(verb, page, auth=None)[0] for verb in ("GET", "POST")}
        # 405: there is no such verb here; 403: a form without its token.
        assert said["GET"] in (401, 405), page
        assert said["POST"] in (401, 403, 405), page
        assert 401 in said.values(), page


def test_without_authentication_only_this_machine_is_answered(
    commands: CommandLine, redis_url: str
) -> None:
    site = started_flower(commands, redis_url, auth=None)

    assert site.get("/", auth=None)[0] == 200
    assert site.get("/", auth=None, host="evil.test")[0] == 403
    assert site.get("/api/tasks", auth=None)[0] == 401


def test_an_open_address_without_authentication_is_refused(
    commands: CommandLine, redis_url: str
) -> None:
    done = commands(
        *("flower", "--address", "0.0.0.0"),  # noqa: S104
        within=LONG,
        STEPFLEET_REDIS_URL=redis_url,
    )

    assert done.returncode == 2
    assert "--basic-auth" in done.stderr


def test_a_port_that_is_taken_is_one_message(commands: CommandLine, redis_url: str) -> None:
    site = started_flower(commands, redis_url, auth=None)

    done = commands("flower", "--port", str(site.port), within=LONG, STEPFLEET_REDIS_URL=redis_url)

    assert done.returncode == 2
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits another process")
def test_strangers_connections_leave_it_files_to_open(
    commands: CommandLine, redis_url: str
) -> None:
    """Beyond half of its files, connections are closed at once, and it goes on."""
    port = free_port()
    flower = commands.start("flower", "--port", str(port), STEPFLEET_REDIS_URL=redis_url)
    commands.until_said("Flower: http", within=LONG)
    resource.prlimit(flower.pid, resource.RLIMIT_NOFILE, (200, 200))
    with contextlib.ExitStack() as stack:
        for _ in range(250):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LONG))
        last = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LONG))
        with contextlib.suppress(ConnectionError):
            assert last.recv(1) == b""
    site = Site(port)
    wait_until(lambda: site.get("/", auth=None)[0] == 200, within=LONG, what="a page")
    assert "Too many open files" not in commands.said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(
    commands: CommandLine, redis_url: str, number: signal.Signals
) -> None:
    port = free_port()
    flower = commands.start("flower", "--port", str(port), STEPFLEET_REDIS_URL=redis_url)
    commands.until_said("Flower: http", within=LONG)

    os.kill(flower.pid, number)

    assert flower.wait(timeout=LONG) == 0, commands.said
    assert "Traceback" not in commands.said


def test_up_starts_flower_as_well(commands: CommandLine) -> None:
    port = free_port()
    up = commands.start("up", *RUN[2:], "--flower", STEPFLEET_FLOWER_PORT=str(port))
    commands.until_said(f"Flower: http://127.0.0.1:{port}", within=LONG)
    site = Site(port)

    wait_until(lambda: site.get("/", auth=None)[0] == 200, within=LONG, what="Flower's first page")
    os.kill(up.pid, signal.SIGINT)
    assert up.wait(timeout=LONG) == 0
    commands.until_all_ended(within=LONG)


def test_tasks_are_kept_over_a_restart_in_a_file_of_their_owner(
    commands: CommandLine, redis_url: str
) -> None:
    address = {"STEPFLEET_REDIS_URL": redis_url}
    refused = commands("flower", "--flower-db", ".", STEPFLEET_REDIS_URL=redis_url)
    assert (refused.returncode, "--flower-db" in refused.stderr) == (2, True)
    options = ("--port", str(free_port()), "--flower-db", "kept")
    flower = commands.start("flower", *options, **address)
    commands.until_said("Flower: http", within=LONG)
    flower.send_signal(signal.SIGTERM)
    assert flower.wait(LONG) == 0, commands.said
    files = list(commands.folder.glob("kept*"))
    assert files
    assert {one.stat().st_mode & 0o077 for one in files} == {0}
