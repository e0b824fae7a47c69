"""What `from stepfleet.orchestrator import ...` offers, and what it costs."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import stepfleet.orchestrator as package


def test_every_public_name_is_there() -> None:
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(package.__all__) <= set(dir(package))


def test_type_checkers_see_the_names_that_exist_when_the_program_runs() -> None:
    tree = ast.parse(Path(str(package.__file__)).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        (node.module, alias.asname)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    there = {
        (f"stepfleet.orchestrator.{module}", name)
        for module, names in package._WHERE.items()
        for name in names.split()
    }
    assert seen == there


def test_importing_the_package_imports_nothing_else() -> None:
    program = (
        "import sys, stepfleet.orchestrator\n"
        "heavy = {'pydantic', 'celery', 'redis', 'httpx'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def _types_in(annotation: Any) -> Iterator[Any]:
    yield annotation
    for one in get_args(annotation):
        yield from _types_in(one)


def _returned(cls: type[Any]) -> Iterator[Any]:
    """Yield the types that a class's public methods and properties return."""
    for name, found in inspect.getmembers_static(cls):
        function = inspect.unwrap(getattr(found, "fget", getattr(found, "__func__", found)))
        own = inspect.isfunction(function) and function.__module__.startswith("stepfleet.")
        if own and not name.startswith("_"):
            yield from _types_in(get_type_hints(function).get("return"))


def test_every_type_that_a_public_method_returns_is_public() -> None:
    """QUAL-06"""
    offered = {getattr(package, name) for name in package.__all__}
    returned = {
        one
        for cls in offered
        if isinstance(cls, type) and cls.__module__.startswith("stepfleet.")
        for one in _returned(cls)
        if isinstance(one, type) and one.__module__.startswith("stepfleet.")
    }
    assert {one.__name__ for one in returned - offered} == set()
    assert len(returned) > 30
