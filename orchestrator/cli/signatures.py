"""The options of commands, read from the source of a module without importing what bodies need.

`stepfleet COMMAND --help` and completion answer at once, and a command is one plain function in
one module. Its options may use what the modules in `LIGHT` define, and names built from that.
"""

import __future__

import ast
import builtins
from importlib import import_module
from pathlib import Path
from typing import Any

LIGHT = ("pathlib", "typing", "typer", "stepfleet.orchestrator.cli")
_FLAGS = __future__.annotations.compiler_flag  # only the hints of commands are evaluated, by Typer


def commands_of(module: str) -> dict[str, Any]:
    """Return functions and `Typer`s of a module of this folder by name, without importing it.

    A function has its signature and docstring; a call imports the module and calls its function.
    Where an installation has no sources, the module itself is imported.
    """
    path = Path(__file__).with_name(f"{module}.py")
    if not path.is_file():
        return vars(import_module(f"{__package__}.{module}"))
    known: dict[str, Any] = {"import_module": import_module}
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.FunctionDef):
            call = f"import_module('{__package__}.{module}').{node.name}(**locals())"
            body = f"{ast.get_docstring(node)!r}; return {call}"
            node.body = ast.parse("\n" * (node.lineno - 1) + body).body
        if _can_run(node, known):
            code = compile(ast.Module([node], []), path, "exec", _FLAGS, dont_inherit=True)
            exec(code, known)  # noqa: S102 - our own source
    return known


def _can_run(node: ast.stmt, known: dict[str, Any]) -> bool:
    """Return whether a statement imports a light module, or uses only names that are known."""
    if isinstance(node, ast.Import):
        return all(alias.name in LIGHT for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.module in LIGHT
    if isinstance(node, ast.FunctionDef):
        used = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
    elif isinstance(node, ast.Assign):
        used = [node.value]
    else:
        return False
    names = {one.id for part in used for one in ast.walk(part) if isinstance(one, ast.Name)}
    return all(name in known or hasattr(builtins, name) for name in names)
