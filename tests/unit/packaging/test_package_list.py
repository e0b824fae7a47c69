"""What pyproject.toml says about packages, data, dependencies and the lock, against the tree."""

import ast
import re
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOP_LEVEL = ("orchestrator", "worker")

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
    "orchestrator/batches": {"tables"},
    "orchestrator/client/batch.py": {"tables"},
    "orchestrator/dashboard": {"flower"},
    "orchestrator/models/pricing/loading.py": {"worker"},
    "orchestrator/models/signing.py": {"bedrock"},
    "orchestrator/cli/flower.py": {"flower"},
    "orchestrator/store/embedded/server.py": {"local"},
}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def source_files(top: str) -> list[Path]:
    return [p for p in (ROOT / top).rglob("*") if p.is_file() and "__pycache__" not in p.parts]


def test_every_package_of_the_tree_is_listed_and_no_other(project: dict[str, Any]) -> None:
    in_tree = {
        ".".join(("stepfleet", *path.parent.relative_to(ROOT).parts))
        for top in TOP_LEVEL
        for path in source_files(top)
        if path.name == "__init__.py"
    }
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(in_tree)


def test_every_module_lies_in_a_package() -> None:
    stray = [
        str(path.relative_to(ROOT))
        for top in TOP_LEVEL
        for path in source_files(top)
        if path.suffix == ".py" and not (path.parent / "__init__.py").exists()
    ]
    assert stray == []


def test_every_kind_of_data_file_is_taken_into_the_wheel(project: dict[str, Any]) -> None:
    """The gate's wheel stage compares the files themselves."""
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    left_out = [
        str(path.relative_to(ROOT))
        for top in TOP_LEVEL
        for path in source_files(top)
        if path.suffix != ".py"
        and not any(fnmatch(path.name, pattern.removeprefix("**/")) for pattern in patterns)
    ]
    assert left_out == []


def test_the_namespace_package_has_no_files_of_its_own() -> None:
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "stepfleet").exists()


def test_type_checkers_find_the_packages_under_their_installed_names() -> None:
    for top in TOP_LEVEL:
        link = ROOT / "tests" / "typings" / "stepfleet" / top
        assert link.is_symlink()
        assert link.resolve() == ROOT / top


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
