"""Tests wait for events or until a deadline, and each of them asserts something."""

import ast
import functools
import re
from pathlib import Path

from support.documents.documents import ROOT

TESTS = ROOT / "tests"
CONFTESTS = sorted(TESTS.rglob("conftest.py"), reverse=True)
ALLOWED = {
    "support/deadlines.py": "waits until a deadline",
}
SLEEPS = {"time.sleep", "asyncio.sleep"}
REASON = re.compile(r"  # (noqa: \w+ - )?(?!noqa|type:)\w")
FAILS = re.compile(r"pytest\.(raises|fail|warns)|AssertionError")


@functools.cache
def parsed(file: Path) -> tuple[dict[str, ast.stmt], dict[str, Path]]:
    """Return a file's functions and classes, and the files of the functions that it imports."""
    defined: dict[str, ast.stmt] = {}
    imported: dict[str, Path] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("support."):
            origin = TESTS / f"{str(node.module).replace('.', '/')}.py"
            imported |= {one.name: origin for one in node.names if one.name.islower()}
    return defined, imported


def defined_in(file: Path, name: str) -> Path | None:
    """Return where a name of a file is defined: there, in what it imports, or as a fixture."""
    fixtures = (one for one in CONFTESTS if one.parent in file.parents)
    for place in (file, parsed(file)[1].get(name), *fixtures):
        if place is not None and name in parsed(place)[0]:
            return place
    return None


def asserts(file: Path, name: str, seen: set[tuple[Path, str]]) -> bool:
    """Return whether a function asserts something, or uses one that does."""
    seen.add((file, name))
    used = set()
    for node in ast.walk(parsed(file)[0][name]):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Name | ast.Attribute):
            used.add(node.id if isinstance(node, ast.Name) else ast.unparse(node))
    return any(map(FAILS.match, used)) or any(
        asserts(place, one, seen)
        for one in used
        if (place := defined_in(file, one)) and (place, one) not in seen
    )


def test_a_sleep_has_its_reason_beside_it() -> None:
    """Waits have `support.deadlines`; what must be slow says why; a sleep of 0 is a turn."""
    bare = []
    for file in TESTS.rglob("*.py"):
        text, name = file.read_text(encoding="utf-8"), str(file.relative_to(TESTS))
        for node in ast.walk(ast.parse(text)) if "sleep(" in text and name not in ALLOWED else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in SLEEPS:
                is_a_turn = ast.unparse(node).endswith("(0)")
                if not is_a_turn and not REASON.search(text.splitlines()[node.lineno - 1]):
                    bare.append(f"{name}:{node.lineno}")
    assert bare == []


def test_every_test_asserts_something() -> None:
    files = sorted(TESTS.rglob("test_*.py"))
    tests = [(file, name) for file in files for name in parsed(file)[0] if name.startswith("test_")]
    assert tests
    assert [name for file, name in tests if not asserts(file, name, set())] == []
