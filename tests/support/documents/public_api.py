"""What `stepfleet` offers, a line for each name, field and method.

Names of `stepfleet.compat` and `stepfleet.types` begin with `compat.` and `types.`.

Write the list anew when a name goes on purpose, and say so in CHANGELOG.md:
python tests/support/documents/public_api.py > tests/support/documents/public_api.txt
"""

import enum
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stepfleet
import stepfleet.compat
import stepfleet.types

LIST = Path(__file__).with_suffix(".txt")


def offered() -> list[str]:
    """Return the lines: `Name`, `Name.attribute`, and `Name.method(argument)` for each argument."""
    return sorted({line for name, found in public().items() for line in _of(name, found)})


def public() -> dict[str, Any]:
    """Return each public name, with the module's name before it, and what it is."""
    modules = {"": stepfleet, "compat.": stepfleet.compat, "types.": stepfleet.types}
    return {
        f"{prefix}{name}": getattr(module, name)
        for prefix, module in modules.items()
        for name in dir(module)
        if name[0].isalpha()
    }


def _of(name: str, found: Any) -> Iterator[str]:
    yield name
    if not isinstance(found, type):
        yield from _arguments(name, found)
        return
    if isinstance(found, enum.EnumMeta):
        yield from (f"{name}.{member}" for member in found.__members__)
    yield from (f"{name}.{field}" for field in getattr(found, "model_fields", ()))
    own = [one for one in found.__mro__ if one.__module__.startswith("stepfleet.")]
    named = {key for one in own for key in vars(one) if not key.startswith(("_", "model_"))}
    annotated = {key for one in own for key in vars(one).get("__annotations__", {})}
    for attribute in named | {key for key in annotated if not key.startswith(("_", "model_"))}:
        yield f"{name}.{attribute}"
        yield from _arguments(f"{name}.{attribute}", inspect.getattr_static(found, attribute, None))
    if "__init__" in {key for one in own for key in vars(one)}:
        yield from _arguments(name, found)


def _arguments(name: str, found: Any) -> Iterator[str]:
    function = getattr(found, "__func__", found)
    if callable(function):
        given = inspect.signature(function).parameters
        yield from (f"{name}({one})" for one in given if one not in {"self", "cls"})


if __name__ == "__main__":
    sys.stdout.write("\n".join(offered()) + "\n")
