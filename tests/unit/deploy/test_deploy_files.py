"""The deployment's files fit each other and what they start; no container engine is needed."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(?:(:[-?])([^}]*))?\}")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


@pytest.fixture(scope="module")
def containerfile() -> str:
    return (DEPLOY / "Containerfile").read_text()


def example() -> dict[str, str]:
    lines = (DEPLOY / ".env.example").read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def variables() -> dict[str, tuple[str, str]]:
    found = VARIABLE.findall((DEPLOY / "compose.yaml").read_text())
    return {name: (kind, default) for name, kind, default in found}


def test_the_example_names_the_variables_of_compose_and_no_others() -> None:
    assert set(example()) == set(variables())


def test_what_the_example_leaves_empty_is_a_secret_that_has_no_default() -> None:
    empty = {name for name, value in example().items() if not value}
    for name in empty:
        assert re.search(r"PASSWORD|USER|KEY", name)
        kind, default = variables()[name]
        assert kind == ":?" or default == ""


def test_the_example_and_compose_agree_on_defaults() -> None:
    for name, (kind, default) in variables().items():
        if kind == ":-":
            assert example()[name] == default


def test_passwords_are_demanded_not_made_up() -> None:
    assert {name for name, (kind, _) in variables().items() if kind == ":?"} == {
        "REDIS_PASSWORD",
        "FLOWER_USER",
        "FLOWER_PASSWORD",
        "STEPFLEET_AGENTS",
    }


def test_every_image_is_pinned_to_a_version(compose: dict[str, Any], containerfile: str) -> None:
    foreign = re.findall(r"^FROM (\S+)", containerfile, re.MULTILINE)
    foreign.append(compose["services"]["redis"]["image"])
    for image in foreign:
        assert re.search(r":\d+\.\d+\.\d+-", image), image


def test_the_image_runs_as_a_user_without_rights(containerfile: str) -> None:
    last_stage = containerfile.rpartition("FROM ")[2]
    assert re.findall(r"^USER (\S+)$", last_stage, re.MULTILINE) == ["10001"]


def test_what_the_image_copies_is_in_the_tree_and_in_the_build_context(
    containerfile: str,
) -> None:
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for line in re.findall(r"^COPY (?!--from)(.+)$", containerfile, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source in kept, source


def test_ports_are_published_on_loopback_only(compose: dict[str, Any]) -> None:
    published = [p for service in compose["services"].values() for p in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_flower_asks_for_a_password(compose: dict[str, Any]) -> None:
    assert compose["services"]["flower"]["environment"]["FLOWER_BASIC_AUTH"]


def test_there_are_two_workers_and_each_is_given_time_to_stop(compose: dict[str, Any]) -> None:
    worker = compose["services"]["worker"]
    assert worker["deploy"]["replicas"] == 2
    assert worker["stop_grace_period"]


def test_every_service_gives_up_the_rights_that_it_does_not_need(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_what_compose_mounts_from_beside_it_is_there(compose: dict[str, Any]) -> None:
    mounts = [v.split(":")[0] for v in compose["services"]["redis"]["volumes"]]
    files = [mount for mount in mounts if mount.startswith("./")]
    assert files
    assert all((DEPLOY / mount).is_file() for mount in files)


def test_the_commands_of_compose_and_readme_exist(compose: dict[str, Any]) -> None:
    used = {compose["services"][name]["command"][0] for name in ("worker", "flower")}
    used |= set(re.findall(r"stepfleet (\w+)`?$", (DEPLOY / "README.md").read_text(), re.MULTILINE))
    assert used == {"worker", "flower", "doctor"}
    for command in sorted(used):
        helped = subprocess.run(
            ["stepfleet", command, "--help"], capture_output=True, text=True, check=False
        )
        assert helped.returncode == 0, helped.stderr


def test_the_options_of_compose_are_options_of_the_commands(compose: dict[str, Any]) -> None:
    for name in ("worker", "flower"):
        command, *words = compose["services"][name]["command"]
        helped = subprocess.run(
            ["stepfleet", command, "--help"],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": os.environ["PATH"], "TERM": "dumb", "COLUMNS": "200"},
        )
        for option in (word for word in words if word.startswith("--")):
            assert option in helped.stdout, f"{command} {option}"


def test_the_lock_tool_of_image_and_gate_is_the_same(containerfile: str) -> None:
    in_image = re.search(r"uv==(\S+)", containerfile)
    in_gate = re.search(r'UV_VERSION="([^"]+)"', (ROOT / "tests" / "check").read_text())
    assert in_image is not None
    assert in_gate is not None
    assert in_image.group(1) == in_gate.group(1)
