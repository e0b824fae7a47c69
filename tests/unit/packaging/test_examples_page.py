"""The page of the examples can be followed from top to bottom in one folder."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "examples" / "README.md"


def test_each_example_writes_a_results_file_of_its_own() -> None:
    """A results file belongs to one batch: a second example into the same one is refused."""
    names = re.findall(r"--out (\S+)", PAGE.read_text())
    assert len(names) > 1
    assert len(set(names)) == len(names)
