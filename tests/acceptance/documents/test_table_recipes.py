"""The recipes from file to file do what their pages say, with a hundredth of the rows."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.documents.documents import DOCS, blocks_of, files_of
from support.servers.redis_servers import short_folder

KEPT = ("HOME", "LANG", "TMPDIR")


class Page:
    """A page's files in a folder of their own, and its commands one after the other."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        blocks = blocks_of((DOCS / "how-to" / name).read_text(encoding="utf-8"))
        for file, text in files_of(blocks).items():
            (folder / file).write_text(text.replace("range(5000)", "range(50)"), encoding="utf-8")
        self.commands = [one.text for one in blocks if one.info == "bash"]

    def run(self, command: str) -> str:
        env = {
            **{one: os.environ[one] for one in KEPT if one in os.environ},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as made:
        yield made


def test_classify_a_table(folder: Path) -> None:
    page = Page("classify-a-table.md", folder)
    made, added = page.commands
    page.run(made)
    assert page.run("python show.py") == "{'lighting': 17, 'other': 16, 'seating': 17}\n"
    said = page.run(added)
    assert "1 new rows" in said
    assert "51/51 done" in said
    assert page.run("python show.py") == "{'lighting': 18, 'other': 16, 'seating': 17}\n"


def test_move_from_openai_batch(folder: Path) -> None:
    page = Page("move-from-openai-batch.md", folder)
    (command,) = page.commands
    page.run(command)
    assert sorted(page.run("python read.py").splitlines()) == ["r0 lighting", "r1 seating"]
