"""Every promise of the pages on guarantees and security is held by a test that exists."""

import re

import pytest
from support.documents.documents import ROOT, pages, table

TEXTS = pages()
PROMISES, EVIDENCE = TEXTS["docs/guarantees.md"], TEXTS["docs/internals/guarantees.md"]
TESTS = {one.stem: one for one in (ROOT / "tests").rglob("test_*.py")}
SOURCE = "\n".join(one.read_text(encoding="utf-8") for one in TESTS.values())


@pytest.mark.parametrize(
    "head", [("promise", "held by"), ("check", "held by"), ("promise", "test")]
)
def test_each_promise_names_what_holds_it(head: tuple[str, str]) -> None:
    """DOC-10: tests by their names, modules by names or paths; each of them is there."""
    rows = table(EVIDENCE, *head)
    assert len(rows) > (2 if head[0] == "check" else 5)
    for cells in rows:
        named = re.findall(r"`((?:tests/|test_)[\w/.]+|stepfleet \w+)`", cells[1])
        assert [one for one in named if not one.startswith("stepfleet ")], cells[0]
        missing = [one for one in named if not is_there(one)]
        assert missing == [], f"{cells[0]}: {missing}"


def test_the_promises_for_users_are_those_that_tests_hold() -> None:
    """DOC-10: a promise and its tests are on two pages, in the same words and the same order."""
    parts = PROMISES.split("\n### ")[1:]
    told = [row for part in parts if "| promise |" in part for row in table(part, "promise")]
    held = [cells[0].replace("](../", "](") for cells in table(EVIDENCE, "promise", "held by")]
    assert [cells[0] for cells in told] == held
    assert len(held) > 70
    assert all(cells[1] for cells in told), "a promise without its limits"


def is_there(named: str) -> bool:
    """Return whether a test, a module of tests, a path or a command exists."""
    if "/" in named:
        return (ROOT / named).exists()
    if named.startswith("stepfleet "):
        return f'"{named.partition(" ")[2]}"' in SOURCE
    stem = named.removesuffix(".py")
    return stem in TESTS or f"def {stem}(" in SOURCE
