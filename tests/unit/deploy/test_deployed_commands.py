"""What the deployment starts is parsed by the command line itself: names, options, values."""

import re
import shlex
from typing import cast

import pytest
import typer
import yaml
from support.manifests import ROOT, example, pods

from stepfleet.orchestrator.cli.main import Command, build

DEPLOY = ROOT / "deploy"
UNITS = DEPLOY / "systemd"


def of_pods() -> set[str]:
    """Return the commands of containers and of their probes."""
    found = set()
    for name in ("production", "spot"):
        for pod in pods(example(name)).values():
            (container,) = pod["containers"]
            found.add(shlex.join(container["args"]))
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                words = container.get(probe, {}).get("exec", {}).get("command", [])
                found |= {shlex.join(words[1:])} if words else set()
    return found


def of_compose() -> set[str]:
    """Return the commands of the services that run our image."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    ours = [one for one in services.values() if "STEPFLEET_IMAGE" in one["image"]]
    assert len(ours) == 3
    return {shlex.join(one["command"]) for one in ours}


def of_units() -> set[str]:
    """Return the commands of systemd's units, with what the example sets in place of variables.

    One unit starts a script, which asks the command line.
    """
    scaling = (DEPLOY / "autoscaling" / "scale-units").read_text()
    found = [re.findall(r"\$\(stepfleet (.+)\)", scaling)]
    for file in UNITS.glob("*.service"):
        started = re.findall(r"(?m)^ExecStart=\S+/(stepfleet .+|scale-units)$", file.read_text())
        assert len(started) == 1
        found.append([one.removeprefix("stepfleet ") for one in started if one != "scale-units"])
    found = [one for one in found if one]
    assert len(found) == 4  # worker, keeper, Flower, and the script
    return {one.replace("$STEPFLEET_WORKER_OPTIONS", "--queue gpu --slots 2") for (one,) in found}


def of_image() -> set[str]:
    """Return the command of the image's health check, and those of the page about it."""
    probe = re.search(r'CMD \["stepfleet", (.+)\]\n', (DEPLOY / "Containerfile").read_text())
    assert probe is not None
    page = (DEPLOY / "README.md").read_text()
    said = re.findall(r"(?:worker|--) stepfleet ([\w -]+)", page)
    assert said
    return {shlex.join(yaml.safe_load(f"[{probe[1]}]")), *(one.strip() for one in said)}


# What every error about options is, in typer's own copy of click.
USAGE = cast("type[Exception]", typer.BadParameter.__bases__[0])


def fault(command: str) -> str:
    """Return what the command line says against a command, or nothing."""
    name, *words = shlex.split(command)
    listed = typer.main.get_group(build()).commands.get(name)
    if not isinstance(listed, Command):
        return "no such command"
    try:
        listed.load().make_context(name, words)
    except USAGE as error:
        return str(error)
    return ""


def test_the_commands_of_the_deployment_are_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPS-01, OPS-06"""
    monkeypatch.setenv("STEPFLEET_AGENTS", "my_agents")
    commands = of_pods() | of_compose() | of_units() | of_image()
    assert {command.split()[0] for command in commands} >= {"worker", "keeper", "flower", "doctor"}
    wrong = {command: said for command in sorted(commands) if (said := fault(command))}
    assert wrong == {}


def test_an_option_or_a_value_that_is_wrong_would_be_found() -> None:
    assert "--adress" in fault("flower --adress x")
    assert "greater than" in fault("worker --agents a --slots 0")
