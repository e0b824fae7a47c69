"""The options of commands, read from the source of a module without importing what bodies need.

`stepfleet COMMAND --help` and completion answer at once, and a command is one plain function in
one module. Its options may use what the modules in `LIGHT` define, and names built from that.
"""

import __future__

import ast
import builtins
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from stepfleet.orchestrator.cli.options import STANDS_FOR

LIGHT = ("dataclasses", "pathlib", "typing", "typer", "stepfleet.orchestrator.cli")
_FLAGS = __future__.annotations.compiler_flag  # only the hints of commands are evaluated


@cache
def commands_of(module: str) -> dict[str, Any]:
    """Return functions, records and `Typer`s of a module of this folder without importing it.

    A function has its signature and docstring; a call imports the module and calls its function.
    A record has its fields. Where an installation has no sources, the module itself is imported.
    """
    path = Path(__file__).with_name(f"{module}.py")
    if not path.is_file():
        return vars(import_module(f"{__package__}.{module}"))
    stands_for = f"{__package__}.{module}"
    known: dict[str, Any] = {"import_module": import_module, STANDS_FOR: stands_for}
    nodes = ast.parse(path.read_bytes()).body
    hints = {name for node in nodes for hint in _hints(node) for name in _names(hint)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (other := _sibling(node.module)):
            for name in hints & {alias.name for alias in node.names}:
                if isinstance(record := commands_of(other).get(name), type):
                    known[name] = record
            continue
        if isinstance(node, ast.FunctionDef):
            call = f"import_module('{stands_for}').{node.name}(**locals())"
            body = f"{ast.get_docstring(node)!r}; return {call}"
            node.body = ast.parse("\n" * (node.lineno - 1) + body).body
        elif isinstance(node, ast.ClassDef):
            node.body = [one for one in node.body if isinstance(one, ast.AnnAssign)]
        if _can_run(node, known):
            flags = _FLAGS if isinstance(node, ast.FunctionDef) else 0
            code = compile(ast.Module([node], []), path, "exec", flags, dont_inherit=True)
            exec(code, known)  # noqa: S102 - our own source
    return known


def _sibling(module: str | None) -> str | None:
    """Return the module's name in this folder, if it is one of its modules."""
    prefix = f"{__package__}."
    return module.removeprefix(prefix) if module and module.startswith(prefix) else None


def _hints(node: ast.stmt) -> list[ast.expr]:
    """Return the hints of a function's parameters, or of a record's fields."""
    if isinstance(node, ast.FunctionDef):
        given = [*node.args.args, *node.args.kwonlyargs]
        return [one.annotation for one in given if one.annotation]
    if isinstance(node, ast.ClassDef):
        return [one.annotation for one in node.body if isinstance(one, ast.AnnAssign)]
    return []


def _names(part: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(part) if isinstance(one, ast.Name)}


def _can_run(node: ast.stmt, known: dict[str, Any]) -> bool:
    """Return whether a statement imports a light module, or uses only names that are known."""
    if isinstance(node, ast.Import):
        return all(alias.name in LIGHT for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.module in LIGHT
    used: list[ast.expr] = []
    if isinstance(node, ast.FunctionDef):
        used = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
    elif isinstance(node, ast.ClassDef) and node.body:
        used = [*node.decorator_list, *node.bases, *_hints(node)]
    elif isinstance(node, ast.Assign):
        used = [node.value]
    else:
        return False
    names = set().union(*map(_names, used))
    return all(name in known or hasattr(builtins, name) for name in names)
