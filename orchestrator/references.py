"""Imports the code that a field names: `module:attribute`, `package.module` or a `.py` file.

Runs the user's code, and turns each of its failures into one message that names field, file,
line and fix. Does not know the purpose of the code.
"""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError

_OURS = str(Path(__file__).resolve().parent)


def load_reference(reference: str, named: str) -> Any:
    """Return the object that `module:attribute` names, or the module of `module` alone.

    `named` is the source of the reference, as "field 'strategy'". Raises `ConfigurationError`
    with the fix.
    """
    name, _, path = reference.partition(":")
    if not name:
        raise _not_there(named, reference, "it names no module")
    found: Any = load_module(name, named, reference)
    for attribute in path.split(".") if path else ():
        try:
            found = getattr(found, attribute)
        except AttributeError:
            raise _not_there(named, reference, f"module {name!r} has no {path!r}") from None
    return found


def load_module(name: str, named: str, reference: str = "") -> ModuleType:
    """Return the module `name`. Raises `ConfigurationError` as `load_reference` does."""
    reference = reference or name
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            missing = f"there is no module {error.name!r} here or on the Python path"
            raise _not_there(named, reference, missing) from None
        raise _failed(named, reference, error) from error
    except (Exception, SystemExit) as error:
        raise _failed(named, reference, error) from error


def load_file(reference: str, named: str) -> ModuleType:
    """Return the module of a `.py` file, its folder importable. Raises `ConfigurationError`."""
    path = Path(reference).expanduser().resolve()
    if not path.is_file():
        raise ConfigurationError(f"{named} {reference}: there is no such file")
    # A name of its own: `math.py` with agents must not become the module `math`.
    name = f"agents_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{named} {reference}: not a Python file (.py)")
    see_folder(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(named, reference, error, path) from error
    return module


def see_folder(folder: str) -> None:
    """Make modules in `folder` importable, as `python FILE` and `python -m` do."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _not_there(named: str, reference: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{named}: {reference!r} cannot be loaded: {why}; name installed code or code in the "
        "working directory, an object in it as module:attribute"
    )


def _failed(
    named: str, reference: str, error: BaseException, path: Path | None = None
) -> ConfigurationError:
    kind = "" if isinstance(error, ConfigurationError) else f"{type(error).__name__}: "
    return ConfigurationError(
        f"{named}: {reference!r} cannot be loaded: {_place(path, error)}{kind}{error}"
    )


def _place(path: Path | None, error: BaseException) -> str:
    """Return `file, line N: ` of the user's own line that led to the error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: "
    theirs = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", _OURS)) and "/importlib/" not in frame.filename
    ]
    own = [frame for frame in theirs if path is not None and frame.filename == str(path)]
    for frame in reversed(own or theirs):
        return f"{frame.filename}, line {frame.lineno}: "
    return ""
