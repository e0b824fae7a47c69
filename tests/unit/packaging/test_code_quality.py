"""The rules that the code keeps as a whole: what imports what, types, tests that must be there."""

import ast
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.documents.documents import ROOT
from support.documents.requirements_table import ID, named_tests
from support.loaded_modules import loaded_by

CORE = (
    "stepfleet.worker.step",
    "stepfleet.orchestrator.protocol.verdict",
    "stepfleet.orchestrator.continuation",
    "stepfleet.orchestrator.agents.agent",
    "stepfleet.orchestrator.memory",
    "stepfleet.orchestrator.protocol.serialization",
    "stepfleet.orchestrator.client.checkpoints",
    "stepfleet.orchestrator.client.rendering",
)
PACKAGE = ROOT / "deploy" / "package" / "stepfleet"
FOREIGN = ("celery", "kombu", "redis", "aiohttp", "httpx", "grpc", "opentelemetry")


def span(group: str, first: int, last: int) -> tuple[str, ...]:
    return tuple(f"{group}-{number:02}" for number in range(first, last + 1))


COMPONENTS = {
    "Message": span("MSG", 3, 5),
    "StopReason": ("CONT-07",),
    "ContinuationEvaluation": ("CONT-08",),
    "ContinuationOutcome": span("CONT", 9, 13),
    "ContinuationCriteria": span("CONT", 2, 6),
    "ErrorType": ("ERR-01",),
    "ErrorPolicy": span("ERR", 8, 14),
    "ErrorPolicyCriterion": ("ERR-15", "ERR-16", "ERR-19"),
    "StateInfo": ("TIME-08", "TIME-09"),
    "CumulativeExecutionTimeLimit": ("CONT-18",),
    "SlimSerializer": span("SER", 6, 17),
    "envelope adapter": span("EVT", 2, 12),
}
SCENARIOS = {
    "a tool call whose arguments are not told as text": span("MSG", 12, 16),
    "errors that are retried as the policy says": (*span("ERR", 17, 19), "ERR-31", "CONT-29"),
    "a pause, and the time that is summed": ("CKPT-11", "TIME-13"),
    "all events are told": ("EVT-04", "EVT-14", "EVT-15"),
}
LISTED = {
    "unit": {
        "parsing": ("TOOL-06", "TOOL-07"),
        "schemas": ("ANS-05", "ANS-06"),
        "handlers and their sink": ("ANS-12",),
    },
    "whole": {
        "a full run": ("RUN-31",),
        "a schema from end to end": ("ANS-08", "ANS-09"),
        "recovery from errors": ("ERR-21",),
    },
}
WHOLE = {"integration", "acceptance"}


@pytest.fixture(scope="module")
def kinds() -> dict[str, set[str]]:
    """Return for each id the kinds of tests (folders) that name it."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        for _, docstring in named_tests(file):
            for one in ID.findall(docstring):
                found.setdefault(one, set()).add(file.relative_to(ROOT / "tests").parts[0])
    return found


@functools.cache
def sources() -> list[tuple[Path, ast.Module]]:
    folders = (ROOT / "orchestrator", ROOT / "worker", PACKAGE)
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return [(file, ast.parse(file.read_text(encoding="utf-8"))) for file in files]


def test_what_decides_and_the_step_load_neither_celery_nor_redis() -> None:
    """QUAL-01: each alone, without the libraries of the edges; contracts say the rest."""
    assert loaded_by(f"import {', '.join(CORE)}").isdisjoint(FOREIGN)


def test_every_module_says_what_it_is_for() -> None:
    """QUAL-01"""
    silent = [
        str(file) for file, tree in sources() if tree.body and ast.get_docstring(tree) is None
    ]
    assert silent == []


def test_the_import_contracts_types_and_rules_are_stages_of_the_gate() -> None:
    """QUAL-01, QUAL-05"""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert project["mypy"]["strict"] is True
    assert "ALL" in project["ruff"]["lint"]["select"]
    assert len(project["importlinter"]["contracts"]) >= 4
    gate = (ROOT / "tests" / "check").read_text(encoding="utf-8")
    assert {"lint", "types", "imports"} <= set(gate.partition("STAGES=(")[2].split(")")[0].split())


def test_every_function_says_the_types_of_its_arguments_and_result() -> None:
    """QUAL-05: and the package tells type checkers so."""
    assert (PACKAGE / "py.typed").exists()
    untyped = [f"{file}:{one.lineno}" for file, tree in sources() for one in _untyped(tree)]
    assert untyped == []


def _untyped(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        given = [one for one in every if one.arg not in {"self", "cls"}]
        if node.returns is None or any(one.annotation is None for one in given):
            yield node


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_of_the_matrix_has_unit_tests(
    component: str, kinds: dict[str, set[str]]
) -> None:
    """QUAL-04: of the twelve components, for each of their requirements."""
    lacking = [one for one in COMPONENTS[component] if "unit" not in kinds.get(one, set())]
    assert lacking == []


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_of_the_matrix_is_tested_as_a_whole(
    scenario: str, kinds: dict[str, set[str]]
) -> None:
    """QUAL-04: of the four scenarios, for each of their requirements."""
    lacking = [one for one in SCENARIOS[scenario] if not WHOLE & kinds.get(one, set())]
    assert lacking == []


def test_the_listed_unit_and_integration_tests_are_there(kinds: dict[str, set[str]]) -> None:
    """QUAL-03"""
    for kind, listed in LISTED.items():
        folders = {"unit"} if kind == "unit" else WHOLE
        for what, ids in listed.items():
            assert all(folders & kinds.get(one, set()) for one in ids), (what, ids)
