import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from support.loaded_modules import loaded_by
from support.workers.warm_starts import COMMAND, run

from stepfleet.orchestrator.cli.main import GROUPS, OLD_WORDS, Command, build

HEAVY = ("pydantic", "redis", "celery", "asyncio.runners", "orjson")
SHOWN = [name for commands in GROUPS.values() for name in commands]


def stepfleet(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"COLUMNS": "200", "PATH": "/usr/bin:/bin", **environment}
    return run(COMMAND, arguments, env=env, cwd=Path.cwd())


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def test_help_lists_every_command_below_its_heading() -> None:
    done = stepfleet("--help")

    assert done.returncode == 0
    rest = done.stdout
    for heading, commands in GROUPS.items():
        _, found, rest = rest.partition(f"─ {heading} ─")
        assert found
        panel = rest.partition("╰")[0]
        assert all(f"│ {name} " in panel for name in commands), heading
    assert not any(f"│ {name} " in done.stdout for name in OLD_WORDS)


def test_help_fits_a_line_for_each_command_at_80_columns() -> None:
    lines = stepfleet("--help", COLUMNS="80").stdout.splitlines()

    assert len([one for one in lines if one.startswith("│ ")]) < len(SHOWN) + 12
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("command", SHOWN)
def test_a_line_of_help_begins_what_the_command_says_of_itself(command: str) -> None:
    listed: Command = typer.main.get_group(build()).commands[command]  # type: ignore[assignment]

    assert listed.load().help.startswith(str(listed.help).rstrip("."))


def test_the_command_line_starts_without_loading_what_commands_need() -> None:
    loaded = loaded_by("from stepfleet.orchestrator.cli.main import build; build()")

    assert loaded.isdisjoint(HEAVY)


def test_every_command_explains_itself_without_what_its_body_needs() -> None:
    probe = (
        "import sys; from stepfleet.orchestrator.cli.main import build\n"
        "from typer.main import get_command\n"
        "for name, listed in get_command(build()).commands.items():\n"
        "    build()([name, '--help'], standalone_mode=False)\n"
        f"    heavy = [one for one in {HEAVY!r} if one in sys.modules]\n"
        "    assert not heavy, (name, heavy)\n"
    )
    done = python(probe)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage") == len(SHOWN) + len(OLD_WORDS)
    assert "--install-completion" not in done.stdout


def test_garbage_is_collected_again_when_a_command_runs() -> None:
    probe = (
        "import atexit, gc, sys; from stepfleet.orchestrator.cli import main\n"
        "atexit.register(lambda: print(gc.isenabled(), 'celery' in sys.modules))\n"
        "sys.argv = ['stepfleet', 'results', 'x', '--out', '/nowhere/x', '--slim']; main()"
    )
    done = python(probe)

    assert "/nowhere/x cannot be written" in done.stderr
    assert done.stdout.splitlines() == ["True True"]


@pytest.mark.parametrize("command", ["run", "status", "checkpoints restore"])
def test_completion_of_options_does_not_load_the_client(command: str) -> None:
    probe = (
        "import atexit, sys; from stepfleet.orchestrator.cli import main\n"
        "atexit.register(lambda: print([name for name in ('celery', 'redis', 'orjson')"
        " if name in sys.modules]))\n"
        "sys.argv = ['stepfleet']; main()"
    )
    words = f"stepfleet {command} --"
    at = str(len(words.split()) - 1)
    done = python(probe, COMP_WORDS=words, COMP_CWORD=at, _STEPFLEET_COMPLETE="complete_bash")

    assert "--data" in done.stdout.split()
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version_is_said() -> None:
    done = stepfleet("--version")

    assert done.returncode == 0
    assert done.stdout.strip()[:1].isdigit()


def test_an_unknown_command_is_a_usage_error() -> None:
    done = stepfleet("fly")

    assert done.returncode == 2
    assert "Traceback" not in done.stderr
