"""Reads the samples of a Markdown page and runs them.

What a page can say of a fenced block, by its first line or the words behind its language:

- ```` ```python ````: is run; the blocks of a page are one program, in their order.
- a first line `# agents.py`: is written to that file, before anything runs, and may be imported.
- ```` ```text ```` right behind a Python block: is what that block prints, to the letter.
- ```` ```python fragment ````: is not run, and has to be Python all the same.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
FRAGMENT = "fragment"
_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\w+\.(?:py|toml))\n")
_RUNNER = Path(__file__).with_name("sample_runner.py")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. `behind` is the number of lines between it and the block before."""

    info: str
    text: str
    line: int
    behind: int = 0

    @property
    def language(self) -> str:
        return self.info.partition(" ")[0]

    @property
    def is_fragment(self) -> bool:
        return FRAGMENT in self.info.split()[1:]

    @property
    def file(self) -> str | None:
        """The file that the block is, if it says so."""
        named = _FILE.match(self.text)
        return named[1] if named else None


@dataclass(frozen=True, slots=True)
class Sample:
    """A block that is run, and what it prints, where the page says so."""

    source: str
    line: int
    prints: str | None = None


def blocks_of(text: str) -> tuple[Block, ...]:
    """Return the fenced blocks of a page, in their order."""
    found: list[Block] = []
    end = 0
    for match in _FENCE.finditer(text):
        behind = text.count("\n", end, match.start())
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(match["info"].strip(), match["text"], line, behind))
        end = match.end()
    return tuple(found)


def files_of(blocks: Sequence[Block]) -> dict[str, str]:
    """Return the files that a page's blocks are, by name."""
    return {one.file: one.text for one in blocks if one.file and not one.is_fragment}


def samples_of(blocks: Sequence[Block]) -> Iterator[Sample]:
    """Yield what is run of a page, with the output that it names."""
    for number, block in enumerate(blocks):
        if block.language != "python" or block.is_fragment or block.file:
            continue
        following = blocks[number + 1] if number + 1 < len(blocks) else None
        shown = following and following.language == "text" and following.behind <= 2
        yield Sample(block.text, block.line, following.text if following and shown else None)


def pages() -> dict[str, str]:
    """Return every page, except the recipes, by its path from the root, with its text."""
    found = [
        ROOT / "README.md",
        *sorted(DOCS.glob("*.md")),
        *sorted(DOCS.glob("internals/*.md")),
        *sorted(ROOT.glob("[!.]*/README.md")),
    ]
    return {str(one.relative_to(ROOT)): one.read_text(encoding="utf-8") for one in found}


def table(text: str, *head: str) -> list[list[str]]:
    """Return the cells of the table whose head begins with these cells, without its head."""
    lines = text.splitlines()
    start = lines.index(next(one for one in lines if one.startswith(f"| {' | '.join(head)} |")))
    body = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in body]
    assert rows, f"the table of {head} is empty"
    return rows


def head_of(text: str, first: str) -> list[str]:
    """Return the head's cells of the table that begins with `first`."""
    line = next(one for one in text.splitlines() if one.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def first_code(cell: str) -> str:
    """Return the first code of a table's cell."""
    found: list[str] = re.findall(r"`([^`]+)`", cell)
    return found[0]


def run_samples(
    samples: Sequence[Sample], folder: Path, env: Mapping[str, str], within: float = 100.0
) -> list[str]:
    """Run the samples as one program in `folder`; return what each has printed.

    Fails with the traceback, and the page's line, where one raises.
    """
    done = subprocess.run(
        [sys.executable, str(_RUNNER)],
        cwd=folder,
        env={**os.environ, **env, "PYTHONPATH": str(folder)},
        input=json.dumps([[one.source, one.line] for one in samples]),
        capture_output=True,
        text=True,
        timeout=within,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed: list[str] = json.loads(done.stdout)
    return printed
