"""Every promise of the pages on guarantees and security is held by a test that exists."""

import re

import pytest
from support.documents.documents import ROOT, pages, table

TEXTS = pages()
TESTS = {one.stem: one for one in (ROOT / "tests").rglob("test_*.py")}
SOURCE = "\n".join(one.read_text(encoding="utf-8") for one in TESTS.values())


@pytest.mark.parametrize(
    ("name", "head", "held_by"), [("guarantees.md", "promise", 2), ("security.md", "promise", 1)]
)
def test_each_promise_names_what_holds_it(name: str, head: str, held_by: int) -> None:
    """DOC-10: tests by their names, modules by names or paths; each of them is there."""
    rows = table(TEXTS[f"docs/{name}"], head)
    assert len(rows) > 5
    for cells in rows:
        named = re.findall(r"`((?:tests/|test_)[\w/.]+|stepfleet \w+)`", cells[held_by])
        assert [one for one in named if not one.startswith("stepfleet ")], cells[0]
        missing = [one for one in named if not is_there(one)]
        assert missing == [], f"{cells[0]}: {missing}"


def is_there(named: str) -> bool:
    """Return whether a test, a module of tests, a path or a command exists."""
    if "/" in named:
        return (ROOT / named).exists()
    if named.startswith("stepfleet "):
        return f'"{named.partition(" ")[2]}"' in SOURCE
    stem = named.removesuffix(".py")
    return stem in TESTS or f"def {stem}(" in SOURCE
