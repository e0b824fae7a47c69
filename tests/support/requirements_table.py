"""The table of requirements: which test holds which, and which nobody holds yet.

Reads titles from `requirements.tsv` (id, title and, where a requirement is open although tests
name it, the reason) and ids from the docstrings of tests. Judges no test: it only looks them up.
Run it to write the page anew: python tests/support/requirements_table.py > docs/requirements.md
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent.parent
TITLES = Path(__file__).with_name("requirements.tsv")
MOST_TESTS = 3
ID = re.compile(r"\b[A-Z]{2,6}-\d\d\b")

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

Written by `python tests/support/requirements_table.py > docs/requirements.md`; a test compares it.
`held`: a test names the requirement and checks it (tests/chaos run apart from the gate). `open`:
none does yet, or what is there holds only a part. At most {most} tests are shown for each.
"""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement. `why_open` is set where it is open although tests name it."""

    id: str
    title: str
    tests: tuple[str, ...] = ()
    why_open: str = ""

    @property
    def group(self) -> str:
        return self.id.partition("-")[0]

    @property
    def held(self) -> bool:
        return bool(self.tests) and not self.why_open

    @property
    def state(self) -> str:
        return "held" if self.held else f"open: {self.why_open or GROUPS[self.group]}"


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
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("test_"):
            yield node.name, ast.get_docstring(node) or ""


def requirements(titles: Path = TITLES, folder: Path = TESTS) -> list[Requirement]:
    """Return all requirements in the order of the file of titles."""
    tests = named_in(folder)
    rows = [line.split("\t") for line in titles.read_text(encoding="utf-8").splitlines()]
    return [
        Requirement(row[0], row[1], tests.get(row[0], ()), row[2] if len(row) > 2 else "")
        for row in rows
    ]


def table(rows: Sequence[Requirement]) -> str:
    """Return the page: counts of each group, then every requirement."""
    lines = [HEAD.format(most=MOST_TESTS), "| group | held | open |", "| --- | ---: | ---: |"]
    groups = {row.group: None for row in rows}
    for group in groups:
        members = [row for row in rows if row.group == group]
        lines.append(f"| {GROUPS[group]} ({group}) {_counts(members)}")
    lines.append(f"| **all {len(rows)}** {_counts(rows)}")
    lines += ["", "| id | requirement | tests | state |", "| --- | --- | --- | --- |"]
    lines += [_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def _counts(rows: Iterable[Requirement]) -> str:
    held = [row.held for row in rows]
    return f"| {sum(held)} | {len(held) - sum(held)} |"


def _line(row: Requirement) -> str:
    tests = "<br>".join(f"`{one}`" for one in row.tests[:MOST_TESTS])
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
