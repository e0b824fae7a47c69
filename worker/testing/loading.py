"""Finds rules by reference: `package.module:attribute` or `path/to/file.py:attribute`."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

from stepfleet.worker.testing.scenario.scripts import Rules


class RulesNotFoundError(Exception):
    """The rules cannot be loaded; the message names the reference and the fix."""


def load_rules(reference: str) -> Rules:
    """Return the rules that `reference` names. Raises `RulesNotFoundError`.

    A file is imported by its path, with its folder importable, as for a script.
    """
    place, colon, attribute = reference.rpartition(":")
    if not colon or not place or not attribute:
        raise RulesNotFoundError(
            f"{reference!r} names no rules; write module:attribute or file.py:attribute"
        )
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    rules = getattr(module, attribute, None)
    if not callable(rules):
        raise RulesNotFoundError(
            f"{place} has no callable {attribute!r}; define a function from a request to a reply"
        )
    return cast("Rules", rules)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RulesNotFoundError(f"there is no file {path}; name one, or a module without .py")
    name = f"stepfleet_rules_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RulesNotFoundError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses of the file look their module up
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module


def _from_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RulesNotFoundError(
            f"the module {name} cannot be imported ({error}); is its folder on the path?"
        ) from error
