"""Imports what a wheel installed and runs its command; started by tests/check, outside the tree.

Arguments: the repository's folder, the package whose modules must all import, and the command.
"""

import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

# Imported only where their extra is installed.
_OF_AN_EXTRA = {
    "stepfleet.orchestrator.dashboard": "flower",
    "stepfleet.worker.testing.fixtures": "pytest",
}


def import_all(package: str) -> int:
    """Import the package and every module below it; return how many they are."""
    names = [package]
    for name in names:
        module = importlib.import_module(name)
        below = pkgutil.iter_modules(getattr(module, "__path__", []), f"{name}.")
        names += [found.name for found in below if _installed(found.name)]
    return len(names)


def _installed(name: str) -> bool:
    extra = _OF_AN_EXTRA.get(name)
    return extra is None or importlib.util.find_spec(extra) is not None


def files_below(root: Path) -> set[Path]:
    """Return the files of the package, relative to its folder; two of its folders may be links."""
    return {
        path.relative_to(root)
        for top in (root, root / "orchestrator", root / "worker")
        for path in top.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def main(repository: str, package: str, command: str) -> None:
    """Check the files, the imports and the command; any failure is an exception."""
    root = Path(str(resources.files("stepfleet")))
    assert Path(sys.prefix) in root.parents, f"{root} is not what the wheel installed"
    tree = Path(repository) / "deploy" / "package" / "stepfleet"
    built = {Path("commit.txt")}  # of a checkout with a commit
    differing = {str(path) for path in (files_below(root) - built) ^ files_below(tree)}
    assert not differing, f"in the tree or in the wheel only: {sorted(differing)}"
    assert metadata.metadata("stepfleet")["License-Expression"] == "MIT"
    program = "from stepfleet import Agent, Fleet, tool; import stepfleet.compat, stepfleet.types"
    subprocess.run([sys.executable, "-c", program], check=True)
    count = import_all(package)
    helped = subprocess.run(
        [str(Path(command).absolute()), "--help"], capture_output=True, text=True, check=False
    )
    assert helped.returncode == 0, helped.stderr
    assert "Usage" in helped.stdout, helped.stdout
    sys.stdout.write(f"{package}: {count} modules imported; the command answered\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
