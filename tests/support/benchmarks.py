"""Imports the modules of `benchmarks/`, which is no package and not on the path of tests."""

import importlib
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def benchmark(name: str) -> Any:
    """Return the module `benchmarks/NAME.py`."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))
