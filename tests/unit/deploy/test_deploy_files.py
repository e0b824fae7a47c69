"""The deployment's files fit each other and what they start; no container engine is needed."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from support.deadlines import wait_until
from support.documents.documents import table
from support.servers.flower_site import Site
from support.servers.redis_servers import free_port

from stepfleet.orchestrator import Settings
from stepfleet.orchestrator.cli.main import Command, build

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
# May be set in .env, for all services, or for the build.
OPTIONAL = {
    *("STEPFLEET_SIGNING_KEY", "STEPFLEET_RELEASE"),
    *("STEPFLEET_ARCHIVE_URL", "STEPFLEET_ARCHIVE_AFTER"),
}
OF_THE_BUILD = {"STEPFLEET_COMMIT", "STEPFLEET_PACKAGES"}
UPPER = re.compile(r"`([A-Z][A-Z0-9_]+)`")
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


def handed_on() -> set[str]:
    """Return the variables without a value: Compose takes them from .env or the shell."""
    loaded = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return {name for name, value in loaded["worker"]["environment"].items() if value is None}


def variables() -> dict[str, tuple[str, str]]:
    found = VARIABLE.findall((DEPLOY / "compose.yaml").read_text())
    return {name: (kind, default) for name, kind, default in found}


def test_the_example_names_the_variables_of_compose_and_no_others() -> None:
    assert set(example()) == set(variables())


def test_what_the_example_leaves_empty_is_a_secret_that_has_no_default() -> None:
    empty = {name for name, value in example().items() if not value}
    for name in empty:
        assert re.search(r"PASSWORD|USER", name)
        assert variables()[name][0] == ":?"


def test_workers_get_the_variables_of_every_provider_and_nobody_else_does(
    compose: dict[str, Any],
) -> None:
    """OPS-06"""
    rows = table((ROOT / "docs" / "providers.md").read_text(), "provider")
    documented = {name for row in rows for cell in row[2:] for name in UPPER.findall(cell)}
    assert handed_on() == documented | OPTIONAL
    commented = re.findall(r"^#(\w+)=$", (DEPLOY / ".env.example").read_text(), re.MULTILINE)
    assert commented
    assert OPTIONAL | OF_THE_BUILD < set(commented) <= documented | OPTIONAL | OF_THE_BUILD
    for name, service in compose["services"].items():
        if name != "worker":
            assert not documented & set(service.get("environment", {}))


def test_settings_of_all_are_given_to_all_and_the_commit_to_the_build(
    compose: dict[str, Any], containerfile: str
) -> None:
    """OPS-06: where a key signs, all that read and write must have it."""
    services = compose["services"]
    for name in ("worker", "keeper", "flower"):
        unset = {key for key, value in services[name]["environment"].items() if value is None}
        assert unset >= OPTIONAL
    args = services["worker"]["build"]["args"]
    assert {name for name, value in args.items() if value is None} == OF_THE_BUILD
    assert set(args) == set(re.findall(r"^ARG (\w+)=", containerfile, re.MULTILINE))


def test_the_page_copies_the_module_that_the_example_names() -> None:
    """OPS-06"""
    page = (DEPLOY / "README.md").read_text()
    module = example()["STEPFLEET_AGENTS"]
    folder = example()["STEPFLEET_AGENTS_FOLDER"].removeprefix("./")
    assert f"mkdir -p {folder} && cp ../{module}.py {folder}/" in page


def test_the_example_and_compose_agree_on_defaults() -> None:
    defaults = {name: default for name, (kind, default) in variables().items() if kind == ":-"}
    assert defaults
    assert defaults.items() <= example().items()


def test_passwords_are_demanded_not_made_up() -> None:
    assert {name for name, (kind, _) in variables().items() if kind == ":?"} == {
        "REDIS_PASSWORD",
        "FLOWER_USER",
        "FLOWER_PASSWORD",
        "STEPFLEET_AGENTS",
    }


def test_every_image_is_pinned_to_a_version(compose: dict[str, Any], containerfile: str) -> None:
    python = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", containerfile, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", containerfile, re.MULTILINE)) == {"${PYTHON_IMAGE}"}
    assert compose["services"]["redis"]["image"].startswith("${REDIS_IMAGE:-")
    assert variables()["PYTHON_IMAGE"] == (":-", *python)
    others = [default for name, (_, default) in variables().items() if name.endswith("_IMAGE")]
    assert len(others) == 5
    for image in {*others, *python} - {"stepfleet:latest"}:
        assert re.search(r":v?\d+\.\d+\.\d+(-|$)", image), image


def test_an_image_can_be_pinned_by_its_digest_where_the_example_says_so() -> None:
    for name in ("REDIS_IMAGE", "PYTHON_IMAGE"):
        assert f"{example()[name]} --format" in (DEPLOY / "README.md").read_text()


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
    lines = re.findall(r"^COPY (?!--from)(.+)$", containerfile, re.MULTILINE)
    copied = {source for line in lines for source in line.split()[:-1]}
    assert copied
    assert {source for source in copied if not (ROOT / source).exists()} == set()
    assert copied <= kept


def test_ports_are_published_on_loopback_only(compose: dict[str, Any]) -> None:
    published = [p for service in compose["services"].values() for p in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def filled(value: str, given: dict[str, str]) -> str:
    """Return a value of the file as Compose hands it on."""

    def one(match: re.Match[str]) -> str:
        name, kind, default = match.groups()
        return given.get(name) or (default if kind == ":-" else "")

    return VARIABLE.sub(one, value).replace("$$", "$")


def environment_of(compose: dict[str, Any], service: str, given: dict[str, str]) -> dict[str, str]:
    told = compose["services"][service]["environment"]
    return {name: filled(value, given) for name, value in told.items() if value is not None}


def read_by_the_command_line(command: str) -> set[str]:
    """Return the variables that a command reads: those of its options, and all settings."""
    listed = typer.main.get_group(build()).commands[command]
    assert isinstance(listed, Command)
    options = {
        name
        for parameter in listed.load().params
        for name in (
            [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
        )
    }
    return options | {f"STEPFLEET_{name.upper()}" for name in Settings.model_fields}


@pytest.mark.parametrize("service", ["worker", "flower"])
def test_every_variable_of_compose_is_read_by_the_command_that_it_is_given_to(
    compose: dict[str, Any], service: str
) -> None:
    (command, *_) = compose["services"][service]["command"]
    given = set(environment_of(compose, service, example()))
    assert given - read_by_the_command_line(command) == set()


def test_flower_starts_with_what_compose_gives_it_and_asks_for_the_password(
    compose: dict[str, Any], redis_url: str, tmp_path: Path
) -> None:
    given = {**example(), "FLOWER_USER": "me", "FLOWER_PASSWORD": "flower-secret"}
    environment = environment_of(compose, "flower", given)
    # Two differ: a test has another Redis, and a port of its own.
    words = list(compose["services"]["flower"]["command"])
    words[words.index("--port") + 1] = str(port := free_port())
    environment["STEPFLEET_REDIS_URL"] = redis_url
    log = tmp_path / "flower.log"
    with log.open("w") as said:
        flower = subprocess.Popen(
            ["stepfleet", *words],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], **environment},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
    try:
        site = Site(port)
        wait_until(
            lambda: flower.poll() is not None or site.get("/")[0] == 200,
            within=120,
            what="Flower's first page",
        )
        assert flower.poll() is None, log.read_text()
        assert site.get("/", auth=None)[0] == 401
        assert site.get("/", auth="me:wrong")[0] == 401
    finally:
        flower.kill()
        flower.wait()


def test_there_are_two_workers_and_each_is_given_its_drain_and_more(
    compose: dict[str, Any],
) -> None:
    """OPS-06"""
    worker = compose["services"]["worker"]
    assert worker["deploy"]["replicas"] == 2
    drain = environment_of(compose, "worker", {})["STEPFLEET_DRAIN"]
    assert worker["stop_grace_period"] == f"{int(drain) + 15}s"


def test_prometheus_scrapes_what_compose_names_as_one_job(compose: dict[str, Any]) -> None:
    """OPS-06: alerts count by job."""
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    scraped = {one["names"][0]: one["port"] for one in job["dns_sd_configs"]}
    worker = environment_of(compose, "worker", {})
    keeper = compose["services"]["keeper"]["command"]
    assert worker["STEPFLEET_METRICS_HOST"] == "0.0.0.0"  # noqa: S104 - a container's network
    assert scraped == {
        "worker": int(worker["STEPFLEET_METRICS_PORT"]),
        "keeper": int(keeper[keeper.index("--port") + 1]),
    }
    source = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert [one["url"] for one in source] == ["http://prometheus:9090"]


def test_every_service_gives_up_the_rights_that_it_does_not_need(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_what_compose_mounts_from_beside_it_is_there(compose: dict[str, Any]) -> None:
    services = compose["services"].values()
    mounts = [v.split(":")[0] for one in services for v in one.get("volumes", [])]
    own = [mount for mount in mounts if mount.startswith("./")]
    assert own
    assert [mount for mount in own if not (DEPLOY / mount).exists()] == []


def test_the_lock_tool_of_image_and_gate_is_the_same(containerfile: str) -> None:
    in_image = re.search(r"uv==(\S+)", containerfile)
    in_gate = re.search(r'UV_VERSION="([^"]+)"', (ROOT / "tests" / "check").read_text())
    assert in_image is not None
    assert in_gate is not None
    assert in_image.group(1) == in_gate.group(1)
