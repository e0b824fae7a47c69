"""What `from stepfleet.orchestrator import ...` offers, and what it costs."""

import ast
import subprocess
import sys
from pathlib import Path

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
        for name in names
    }
    assert seen == there


def test_importing_the_package_imports_nothing_else() -> None:
    program = (
        "import sys, stepfleet.orchestrator\n"
        "heavy = {'pydantic', 'celery', 'redis', 'httpx'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
