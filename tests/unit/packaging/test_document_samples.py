"""How samples are taken out of a page: what is run, what is a file, what is a fragment."""

from pathlib import Path

import pytest
from support.documents.documents import Sample, blocks_of, files_of, run_samples, samples_of, table

PAGE = """\
# A page

```python
# agents.py
answer = 42
```

Text between.

```python
from agents import answer

print(answer)
```

```text
42
```

```python fragment
this = is_not_run(...)
```

```python
again = answer + 1
```

Text between.

```text
not an output
```

| name | is |
|---|---|
| `a` | one |

| name | more | columns |
|---|---|---|
| `b` | c | d |
"""


def test_blocks_are_files_samples_with_their_output_or_fragments() -> None:
    blocks = blocks_of(PAGE)
    assert files_of(blocks) == {"agents.py": "# agents.py\nanswer = 42\n"}
    printing, silent = samples_of(blocks)
    assert (printing.prints, silent.prints) == ("42\n", None)
    assert [one.is_fragment for one in blocks] == [False, False, False, True, False, False]
    assert printing.line == PAGE.splitlines().index("from agents import answer")


def test_samples_share_their_names_and_what_each_prints_is_reported(tmp_path: Path) -> None:
    samples = [Sample("x = 1\nprint(x)", 1), Sample("y = x + 1", 5), Sample("print(x, y)", 9)]
    assert run_samples(samples, tmp_path, {}) == ["1\n", "", "1 2\n"]


def test_a_sample_that_raises_fails_with_its_line_of_the_page(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r'"page\.md", line 8(?s:.)*ZeroDivisionError'):
        run_samples([Sample("x = 0\nprint(1 / x)", 6)], tmp_path, {})


def test_a_table_ends_where_its_lines_end() -> None:
    assert table(PAGE, "name", "is") == [["`a`", "one"]]
    assert table(PAGE, "name", "more") == [["`b`", "c", "d"]]
