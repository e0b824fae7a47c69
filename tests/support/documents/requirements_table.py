"""The table of requirements: which test holds which, and which nobody holds yet.

Reads titles from `requirements.tsv` (id, title and, where the tests that name a requirement do not
hold all of it, what is missing) and ids from the docstrings of tests. Judges no test: it only looks
them up.
To write the page anew:
python tests/support/documents/requirements_table.py > docs/requirements.md
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[2]
TITLES = Path(__file__).with_name("requirements.tsv")
MOST_TESTS = 3
ID = re.compile(r"\b[A-Z]{2,6}-\d\d\b")
LONG = frozenset({"long", "chaos", "soak"})
"""Markers of tests that the gate leaves out and `tests/check long` runs."""

GROUPS = {
    "MSG": "messages",
    "STATE": "agent state",
    "RUN": "run results",
    "LLM": "models and providers",
    "TOOL": "tools",
    "ANS": "answer contract",
    "MEM": "memory",
    "STRAT": "strategies",
    "CONT": "continuation",
    "ERR": "errors and retry",
    "TIME": "time",
    "SER": "serialization",
    "EVT": "events",
    "UI": "rendering contract",
    "COST": "cost",
    "CKPT": "checkpoints",
    "STRM": "streaming",
    "MULTI": "several agents",
    "PLAN": "planning",
    "CACHE": "response cache",
    "CONF": "configuration",
    "OBS": "observability",
    "DOC": "documentation",
    "QUAL": "code quality",
    "DIST": "distribution",
}

HEAD = """\
# Requirements

Written by `python tests/support/documents/requirements_table.py > docs/requirements.md`; a test
compares it.
`held`: tests name the requirement and check it. `held by long tests`: none of them is in the gate.
`partly`: tests check a part; what they do not hold is named. `open`: nothing holds it. At most
{most} tests of the gate are shown for each, and those outside it, marked *long*, which check more
or at a larger scale: `bash tests/check long` runs them before a release.
"""

COUNTS = (
    "| group | held | of these by long tests | partly | open |",
    "| --- | ---: | ---: | ---: | ---: |",
)


@dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement. `why_open` is what its tests do not hold; `long`: those outside the gate."""

    id: str
    title: str
    tests: tuple[str, ...] = ()
    why_open: str = ""
    long: frozenset[str] = frozenset()

    @property
    def group(self) -> str:
        return self.id.partition("-")[0]

    @property
    def held(self) -> bool:
        return bool(self.tests) and not self.why_open

    @property
    def state(self) -> str:
        if not self.tests:
            return f"open: {self.why_open or GROUPS[self.group]}"
        if self.why_open:
            return f"partly: {self.why_open}"
        return "held by long tests" if self.long.issuperset(self.tests) else "held"


def named_in(folder: Path = TESTS) -> dict[str, tuple[str, ...]]:
    """Return for each id the tests (`file::name`) whose docstring names it, sorted."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for file in folder.rglob("test_*.py"):
        for name, docstring in named_tests(file):
            for one in ID.findall(docstring):
                found[one].add(f"{file.name}::{name}")
    return {one: tuple(sorted(tests)) for one, tests in found.items()}


def named_tests(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the tests of a file, each with its docstring."""
    for test in _tests(ast.parse(file.read_text(encoding="utf-8"))):
        yield test.name, ast.get_docstring(test) or ""


def long_tests(folder: Path = TESTS) -> frozenset[str]:
    """Return the tests (`file::name`) that only `tests/check long` runs."""
    found: set[str] = set()
    for file in folder.rglob("test_*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        is_long = any(
            _marks(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        )
        found |= {
            f"{file.name}::{test.name}"
            for test in _tests(tree)
            if is_long or any(_marks(one) for one in test.decorator_list)
        }
    return frozenset(found)


def _tests(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("test_"):
            yield node


def _marks(marked: ast.expr) -> bool:
    """Return whether a decorator, or the value of `pytestmark`, keeps its tests out of the gate."""
    return any(isinstance(node, ast.Attribute) and node.attr in LONG for node in ast.walk(marked))


def requirements(titles: Path = TITLES, folder: Path = TESTS) -> list[Requirement]:
    """Return all requirements in the order of the file of titles."""
    tests, long = named_in(folder), long_tests(folder)
    rows = [line.split("\t") for line in titles.read_text(encoding="utf-8").splitlines()]
    return [
        Requirement(row[0], row[1], tests.get(row[0], ()), row[2] if len(row) > 2 else "", long)
        for row in rows
    ]


def table(rows: Sequence[Requirement]) -> str:
    """Return the page: counts of each group, then every requirement."""
    lines = [HEAD.format(most=MOST_TESTS), *COUNTS]
    groups = {row.group: None for row in rows}
    for group in groups:
        members = [row for row in rows if row.group == group]
        lines.append(f"| {GROUPS[group]} ({group}) {_counts(members)}")
    lines.append(f"| **all {len(rows)}** {_counts(rows)}")
    lines += ["", "| id | requirement | tests | state |", "| --- | --- | --- | --- |"]
    lines += [_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def _counts(rows: Iterable[Requirement]) -> str:
    states = Counter(row.state.partition(":")[0] for row in rows)
    held = states["held"] + states["held by long tests"]
    return f"| {held} | {states['held by long tests']} | {states['partly']} | {states['open']} |"


def _line(row: Requirement) -> str:
    quick = [f"`{one}`" for one in row.tests if one not in row.long][:MOST_TESTS]
    tests = "<br>".join([*quick, *(f"`{one}` *long*" for one in row.tests if one in row.long)])
    title = row.title.replace("<", "&lt;").replace("|", "\\|")
    return f"| {row.id} | {title} | {tests} | {row.state} |"


def unknown(rows: Iterable[Requirement], tests: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return ids of known groups that tests name and no requirement has, each with one test."""
    known = {row.id for row in rows}
    return {
        one: where[0]
        for one, where in tests.items()
        if one.partition("-")[0] in GROUPS and one not in known
    }


if __name__ == "__main__":
    sys.stdout.write(table(requirements()))
