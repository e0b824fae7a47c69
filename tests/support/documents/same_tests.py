"""The tests of another module, to be run once more with other fixtures."""

import importlib
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

INTEGRATION = Path(__file__).parents[2] / "integration"


def borrowed(module: str, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return what a module of integration tests holds: its tests and fixtures by their names.

    The fixtures that they ask for are those of the module which takes them over. Tests `without`
    must exist: who renames one has to say so here.
    """
    (file,) = INTEGRATION.rglob(f"{module}.py")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    pytest.register_assert_rewrite(module)
    held = vars(importlib.import_module(module))
    gone = set(without) - held.keys()
    assert not gone, f"{module} has no such tests any more: {', '.join(sorted(gone))}"
    return {
        name: value
        for name, value in held.items()
        if not name.startswith("__") and name not in without
    }
