"""Names that are imported at their first use, listed once: where type checkers read them."""

import ast
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(module: str, *files: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module that offers what files of stepfleet import.

    The files, relative to this folder, are read at the first use of a name.
    """

    @cache
    def origins() -> dict[str, str]:
        trees = [ast.parse((Path(__file__).parent / file).read_bytes()) for file in files]
        return {
            alias.name: node.module
            for tree in trees
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }

    def find(name: str) -> Any:
        if name == "__all__":
            return list(origins())
        if name.startswith("__") or name not in origins():
            msg = f"module {module!r} has no attribute {name!r}"
            raise AttributeError(msg)
        return getattr(import_module(origins()[name]), name)

    return find, lambda: sorted(origins())
