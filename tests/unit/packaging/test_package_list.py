"""What is packaged, and what pyproject.toml says of dependencies and the lock, against the tree."""

import ast
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.plugin.interface import BuilderInterface
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import stepfleet

ROOT = Path(__file__).resolve().parents[3]
TOP_LEVEL = ("orchestrator", "worker")
PACKAGE = ROOT / "deploy" / "package" / "stepfleet"

# Modules whose import name is not the name of what installs them.
DISTRIBUTIONS = {"opentelemetry": "opentelemetry-api", "prometheus_client": "prometheus-client"}
# Their versions follow what depends on them.
BROUGHT_ALONG = {
    "amqp": "celery",
    "billiard": "celery",
    "click": "typer",
    "httpx2": "mcp",
    "mcp-types": "mcp",
    "pydantic-core": "pydantic",
    "tornado": "flower",
    "vine": "celery",
}
# Parts of the orchestrator that belong to an extra; all else installs with the core.
EXTRAS_OF_ROOMS = {
    "orchestrator/memory/tokens.py": {"tokens"},
    "orchestrator/agents/recall.py": {"vector"},
    "orchestrator/archive": {"archive"},
    "orchestrator/batches": {"tables"},
    "orchestrator/client/batch.py": {"tables"},
    "orchestrator/dashboard": {"flower"},
    "orchestrator/models/pricing/loading.py": {"worker"},
    "orchestrator/models/signing.py": {"bedrock"},
    "orchestrator/store/embedded/server.py": {"local"},
}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def source_files(top: str) -> list[Path]:
    return [p for p in (ROOT / top).rglob("*") if p.is_file() and "__pycache__" not in p.parts]


def test_every_module_lies_in_a_package() -> None:
    stray = [
        str(path.relative_to(ROOT))
        for top in TOP_LEVEL
        for path in source_files(top)
        if path.suffix == ".py" and not (path.parent / "__init__.py").exists()
    ]
    assert stray == []


def test_wheel_and_source_archive_take_all_files_of_the_package() -> None:
    """The gate's wheel stage compares what is installed."""
    in_tree = {
        f"stepfleet/{path.relative_to(ROOT)}" for top in TOP_LEVEL for path in source_files(top)
    } | {f"stepfleet/{path.name}" for path in PACKAGE.iterdir() if path.is_file()}
    assert packaged(WheelBuilder(str(ROOT))) == in_tree
    assert packaged(SdistBuilder(str(ROOT))) >= {f"deploy/package/{name}" for name in in_tree}


def packaged(builder: BuilderInterface[Any, Any]) -> set[str]:
    return {file.distribution_path for file in builder.recurse_included_files()}


def test_the_package_is_public_names_and_links_to_the_two_halves() -> None:
    names = {"__init__.py", "__init__.pyi", "_lazy.py", "compat.py", "types.py", "py.typed"}
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    links = {path.name: path.resolve() for path in entries if path.is_symlink()}
    assert links == {top: ROOT / top for top in TOP_LEVEL}
    assert {path.name for path in entries} == names | links.keys()
    assert not (ROOT / "stepfleet").exists()


def test_an_editable_install_is_a_path_that_type_checkers_follow() -> None:
    pth = Path(sysconfig.get_path("purelib")) / "_stepfleet.pth"
    assert pth.read_text().splitlines() == [str(PACKAGE.parent)]
    assert Path(str(stepfleet.__file__)).parent == PACKAGE


@pytest.mark.slow
def test_mypy_sees_the_public_names_and_no_others_in_a_users_program(tmp_path: Path) -> None:
    """With the user's own configuration, from outside the repository."""
    (tmp_path / "program.py").write_text(
        "from stepfleet import Agent, Fleet, tool\n"
        "from stepfleet.orchestrator import Agent as Old, RunPage as Page\n"
        "from stepfleet.compat import AgentTrace\n"
        "from stepfleet.types import RunPage\n"
        "reveal_type(Agent('a', model='b'))\n"
        "same: type[Agent] = Old\n"
        "alike: type[RunPage] = Page\n"
    )
    (tmp_path / "typo.py").write_text("from stepfleet import Agnet\n")
    command = (sys.executable, "-m", "mypy", "--strict", "--config-file=", "program.py", "typo.py")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = done.stdout.splitlines()
    assert 'Revealed type is "stepfleet.orchestrator.agents.agent.Agent"' in done.stdout
    (error,) = [line for line in said if ": error:" in line]
    assert error.startswith('typo.py:1: error: Module "stepfleet" has no attribute "Agnet"')


def required(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!; ]", line)[0].lower() for line in requirements}


def foreign_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    tops = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"stepfleet"}
    return {DISTRIBUTIONS.get(top, top.replace("_", "-")) for top in tops}


def undeclared(path: Path, extras: set[str], project: dict[str, Any]) -> set[str]:
    optional = project["project"]["optional-dependencies"]
    allowed = required(project["project"]["dependencies"])
    for extra in extras:
        allowed |= required(optional[extra])
    return {name for name in foreign_imports(path) if BROUGHT_ALONG.get(name, name) not in allowed}


def test_the_orchestrator_imports_nothing_that_a_client_does_not_install(
    project: dict[str, Any],
) -> None:
    missing = {}
    for path in source_files("orchestrator"):
        if path.suffix != ".py":
            continue
        place = str(path.relative_to(ROOT))
        extras = {e for room, es in EXTRAS_OF_ROOMS.items() if place.startswith(room) for e in es}
        if found := undeclared(path, extras, project):
            missing[place] = found
    assert missing == {}


def extras_of_worker(path: Path) -> set[str]:
    if path.is_relative_to(ROOT / "worker" / "toolbox" / "mcp"):
        return {"worker", "mcp"}
    if path.is_relative_to(ROOT / "worker" / "telemetry"):
        return {"worker", "telemetry"}
    return {"worker", "testing"} if path.name == "fixtures.py" else {"worker"}


def test_the_worker_imports_only_what_the_core_and_its_extra_declare(
    project: dict[str, Any],
) -> None:
    missing = {
        str(path.relative_to(ROOT)): found
        for path in source_files("worker")
        if path.suffix == ".py" and (found := undeclared(path, extras_of_worker(path), project))
    }
    assert missing == {}


def test_every_requirement_has_a_floor_and_a_ceiling(project: dict[str, Any]) -> None:
    listed = [
        *project["project"]["dependencies"],
        *(line for lines in project["project"]["optional-dependencies"].values() for line in lines),
        *project["dependency-groups"]["dev"],
    ]
    loose = [
        line
        for line in listed
        if not line.startswith("stepfleet[") and "==" not in line and not re.search(r">=.*,<", line)
    ]
    assert loose == []


def test_the_lock_names_public_hosts_only() -> None:
    hosts = set(re.findall(r"https?://([^/\"]+)", (ROOT / "uv.lock").read_text()))
    assert hosts == {"pypi.org", "files.pythonhosted.org"}


def test_every_locked_file_has_a_hash() -> None:
    for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]:
        files = [*package.get("wheels", []), *filter(None, [package.get("sdist")])]
        assert all(file["hash"].startswith("sha256:") for file in files)
        assert files or package["source"] == {"editable": "."}
