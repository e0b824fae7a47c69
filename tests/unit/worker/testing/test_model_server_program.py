import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from support.deadlines import until, wait_until

RULES = """
from dataclasses import dataclass
from stepfleet.worker.testing import Reply

@dataclass
class Prefix:
    text: str

def rules(request):
    return Reply(Prefix("you said ").text + request.question)
"""
MODULE = [sys.executable, "-m", "stepfleet.worker.testing"]


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    file = tmp_path / "rules.py"
    file.write_text(RULES)
    return file


@contextlib.contextmanager
def program(rules: Path, *arguments: str, **how: Any) -> Iterator[subprocess.Popen[str]]:
    command = [*MODULE, "--rules", f"{rules}:rules", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **how) as process:
        try:
            yield process
        finally:
            process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    assert told["pid"] == process.pid
    return str(told["url"])


def ask(url: str, question: str = "hi") -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": question}]}
    return httpx.post(f"{url}/chat/completions", json=body, timeout=60)


def test_the_program_prints_its_url_serves_and_ends_on_sigterm(rules: Path) -> None:
    with program(rules) as process:
        message = ask(url_of(process)).json()["choices"][0]["message"]
        assert message["content"] == "you said hi"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_the_program_ends_when_its_input_ends(rules: Path) -> None:
    with program(rules, "--stdin", stdin=subprocess.PIPE) as process:
        url_of(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_the_program_ends_when_the_watched_process_is_gone(rules: Path) -> None:
    with (
        subprocess.Popen(["sleep", "60"]) as watched,
        program(rules, "--parent-pid", str(watched.pid)) as process,
    ):
        url_of(process)
        watched.kill()
        watched.wait()
        assert process.wait(60) == 0


def test_the_program_ends_with_a_parent_that_is_killed(rules: Path, tmp_path: Path) -> None:
    """The starter dies by SIGKILL and tells nobody."""
    starter = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen({[*MODULE, '--rules', f'{rules}:rules']!r}"
        " + ['--parent-pid', str(os.getpid())])\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", starter]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = json.loads(parent.stdout.readline())["pid"]
        parent.kill()
        parent.wait()
        wait_until(lambda: not _runs(pid), within=60, what="the end of the server")


def test_port_latency_faults_and_log_are_options(rules: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    options = ["--latency", "0.01-0.02", "--faults", "1", "--fault-kinds", "rate_limited=2"]
    options += ["--retry-after", "0.5", "--first-attempts", "1", "--log", str(log)]
    with program(rules, *options) as process:
        url = url_of(process)
        refused, answered = ask(url), ask(url)
        assert (refused.status_code, answered.status_code) == (429, 200)
        assert refused.headers["retry-after"] == "0.5"
        wait_until(lambda: log.read_bytes().count(b"\n") == 2, within=60)
        port = url.split(":")[2].split("/")[0]
        taken = subprocess.run(
            [*MODULE, "--rules", f"{rules}:rules", "--port", port],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert taken.returncode == 2
    assert port in taken.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rules", "nothing"], "module:attribute"),
        (["--rules", "no/such/file.py:rules"], "there is no such file"),
        (["--rules", "no_such_module:rules"], "no_such_module"),
        (["--rules", "json:nothing"], "no callable 'nothing'"),
        (["--rules", "json:loads", "--latency", "soon"], "soon"),
        (["--rules", "json:loads", "--faults", "7"], "from 0 to 1"),
        (["--rules", "json:loads", "--fault-kinds", "x"], "not a kind of fault|not a valid"),
    ],
)
def test_a_wrong_setup_exits_with_2_and_says_what(arguments: list[str], words: str) -> None:
    ended = subprocess.run([*MODULE, *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert any(word in ended.stderr for word in words.split("|"))
    assert "Traceback" not in ended.stderr


@pytest.mark.timeout(600)  # thousands of connections are processor time
@pytest.mark.parametrize("wanted", [1200, pytest.param(3000, marks=pytest.mark.long)])
def test_thousands_of_requests_are_in_flight_at_once(rules: Path, wanted: int) -> None:
    """More than `select` could watch: all hang, and are answered when they ask again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        faults = ("--faults", "1", "--fault-kinds", "hang", "--first-attempts", "1")
        with program(rules, *faults) as process:
            answers = asyncio.run(_hang_and_ask_again(url_of(process), wanted))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert answers == [f"you said {i}" for i in range(wanted)]


async def _hang_and_ask_again(url: str, count: int) -> list[str]:
    """Return what is answered while `count` requests are in flight."""
    async with _session(0) as many, _session(50) as few:

        async def all_hang() -> bool:
            async with few.get(url.removesuffix("/v1") + "/stats") as response:
                return bool((await response.json())["in_flight"] == count)

        hanging = [asyncio.create_task(_ask(many, url, i)) for i in range(count)]
        await until(all_hang, within=300)
        answers = await asyncio.gather(*(_ask(few, url, i) for i in range(count)))
        assert not any(one.done() for one in hanging)
        for one in hanging:
            one.cancel()
        await asyncio.wait(hanging)
        return answers


def _session(limit: int) -> aiohttp.ClientSession:
    connector, patient = aiohttp.TCPConnector(limit=limit), aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=connector, timeout=patient)


async def _ask(session: aiohttp.ClientSession, url: str, i: int) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": str(i)}]}
    async with session.post(f"{url}/chat/completions", json=body) as response:
        return str((await response.json())["choices"][0]["message"]["content"])


def test_the_fixture_serves_users_and_reports_violations(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        'pytest_plugins = ["stepfleet.worker.testing.fixtures"]\n'
    )
    (tmp_path / "test_agent.py").write_text(
        "import httpx\n"
        "def ask(server, *messages):\n"
        "    body = {'model': 'm', 'messages': list(messages)}\n"
        "    return httpx.post(server.url + '/chat/completions', json=body)\n"
        "def test_sound(model_server):\n"
        "    model_server.script('hi', 'hello')\n"
        "    assert ask(model_server, {'role': 'user', 'content': 'hi'}).status_code == 200\n"
        "def test_unsound(model_server):\n"
        "    assert ask(model_server, {'role': 'tool', 'content': 'x'}).status_code == 400\n"
        "def test_meant(model_server):\n"
        "    assert ask(model_server, {'role': 'tool', 'content': 'x'}).status_code == 400\n"
        "    model_server.log.clear()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert "3 passed, 1 error" in ran.stdout
    assert "ERROR test_agent.py::test_unsound" in ran.stdout
    assert "a user message comes first" in ran.stdout


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
