import subprocess
import sys
from pathlib import Path

import pytest
from support.workers.warm_starts import COMMAND, run

HEAVY = ("pydantic", "redis", "celery", "asyncio.runners", "orjson")
COMMANDS = (
    *("run", "ask", "up", "worker", "flower", "submit", "status", "watch", "results"),
    *("snapshot", "checkpoint", "restore", "fork", "compare"),
    *("show", "explain", "events", "retry", "send", "cancel", "pause", "resume", "doctor"),
)


def stepfleet(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"COLUMNS": "200", "PATH": "/usr/bin:/bin", **environment}
    return run(COMMAND, arguments, env=env, cwd=Path.cwd())


def test_help_lists_every_command() -> None:
    done = stepfleet("--help")

    assert done.returncode == 0
    assert all(f" {command} " in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    done = stepfleet(command, "--help")

    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_the_command_line_starts_without_loading_what_commands_need() -> None:
    probe = (
        "import sys; from stepfleet.orchestrator.cli.main import build; build(); "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "[]"


def test_the_version_is_said() -> None:
    done = stepfleet("--version")

    assert done.returncode == 0
    assert done.stdout.strip()[:1].isdigit()


def test_an_unknown_command_is_a_usage_error() -> None:
    done = stepfleet("fly")

    assert done.returncode == 2
    assert "Traceback" not in done.stderr
