from pathlib import Path

import pytest
from support.documents.requirements_table import (
    GROUPS,
    Requirement,
    long_tests,
    named_in,
    requirements,
    table,
    unknown,
)

PAGE = Path(__file__).parents[3] / "docs" / "internals" / "requirements.md"


def test_the_page_is_what_the_tests_say_now() -> None:
    assert PAGE.read_text(encoding="utf-8") == table(requirements()), (
        "run: python tests/support/documents/requirements_table.py > docs/internals/requirements.md"
    )


def test_every_requirement_has_an_id_of_its_own_and_a_title_of_one_line() -> None:
    rows = requirements()
    assert len({row.id for row in rows}) == len(rows) == 447
    assert {row.group for row in rows} == set(GROUPS)
    assert all(8 <= len(row.title) <= 110 for row in rows)


def test_no_test_names_a_requirement_that_there_is_not() -> None:
    assert unknown(requirements(), named_in()) == {}


def test_ids_are_read_from_the_docstrings_of_tests_alone(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        '"""MSG-09"""\n'
        'def helper():\n    """MSG-08"""\n'
        'async def test_b():\n    """MSG-01, DIST-02: both, and trap F3."""\n'
        'class TestThem:\n    def test_a(self):\n        """MSG-01"""\n'
    )
    assert named_in(tmp_path) == {
        "MSG-01": ("test_it.py::test_a", "test_it.py::test_b"),
        "DIST-02": ("test_it.py::test_b",),
    }


@pytest.mark.parametrize(
    ("row", "state"),
    [
        (Requirement("MSG-01", "t", ("a",)), "held"),
        (Requirement("MSG-01", "t"), "open: messages"),
        (Requirement("MSG-01", "t", ("a",), "only half"), "partly: only half"),
        (Requirement("MSG-01", "t", (), "later"), "open: later"),
        (Requirement("MSG-01", "t", ("a", "b"), long=frozenset("a")), "held"),
        (Requirement("MSG-01", "t", ("a", "b"), long=frozenset("abc")), "held by long tests"),
    ],
)
def test_a_requirement_is_held_by_a_test_unless_a_part_is_missing(
    row: Requirement, state: str
) -> None:
    assert row.state == state


def test_long_tests_are_found_by_their_markers(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "@pytest.mark.chaos\n@pytest.mark.timeout(3)\nasync def test_a(): ...\n"
        "@pytest.mark.slow\ndef test_b(): ...\n"
    )
    (tmp_path / "test_c.py").write_text(
        "pytestmark = [pytest.mark.timeout(3), pytest.mark.long]\ndef test_c(): ...\n"
    )
    assert long_tests(tmp_path) == {"test_a.py::test_a", "test_c.py::test_c"}


def test_the_page_counts_each_group_and_shows_three_tests_of_each_requirement() -> None:
    rows = [Requirement("MSG-01", "a < b", ("1", "2", "3", "4")), Requirement("UI-01", "u")]
    page = table(rows)
    assert "| messages (MSG) | 1 | 0 | 0 | 0 |" in page
    assert "| **all 2** | 1 | 0 | 0 | 1 |" in page
    assert "| MSG-01 | a &lt; b | `1`<br>`2`<br>`3` | held |" in page
