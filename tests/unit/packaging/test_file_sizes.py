"""How long the files of the repository are."""

import os
from collections.abc import Iterator
from pathlib import Path

from support.documents.documents import ROOT

LONGEST = 600
LONGEST_MODULE = 600
MODULES = ("orchestrator", "worker")
BUILT = {"build", "dist", "node_modules", "__pycache__"}


def python_files(folder: Path) -> Iterator[Path]:
    """Yield the repository's own files: no environments, caches or builds."""
    for place, folders, names in os.walk(folder):
        folders[:] = [one for one in folders if one not in BUILT and not one.startswith(".")]
        yield from (Path(place, name) for name in names if name.endswith((".py", ".pyi")))


def longer_than(lines: int, *folders: Path) -> dict[str, int]:
    sizes = {
        str(path.relative_to(ROOT)): len(path.read_bytes().splitlines())
        for folder in folders
        for path in python_files(folder)
    }
    assert sizes, "no files were found"
    return {name: size for name, size in sizes.items() if size > lines}


def test_no_file_is_longer_than_600_lines() -> None:
    """QUAL-02"""
    assert longer_than(LONGEST, ROOT) == {}


def test_no_module_of_the_packages_is_longer_than_400_lines() -> None:
    """QUAL-02"""
    assert longer_than(LONGEST_MODULE, *(ROOT / name for name in MODULES)) == {}
