"""The matrix of docs/providers.md: docs/internals/providers.md names a test of each cell."""

import ast
from collections.abc import Iterator
from pathlib import Path

from stepfleet.orchestrator.models.services import SERVICES

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
PAGES = "".join(
    (DOCS / one).read_text(encoding="utf-8") for one in ("providers.md", "internals/providers.md")
)
USUAL = "test_model_providers.py"


def section(title: str) -> list[list[str]]:
    """Return the rows of the first table below a heading, its head first, without the rule."""
    text = PAGES.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def providers_of(tree: ast.Module, test: str) -> tuple[str, ...]:
    """Return the providers for which a test runs; none where there is no such test."""
    found = (node for node in tree.body if getattr(node, "name", "") == test)
    node = next(found, None)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ()
    if "provider" not in {one.arg for one in node.args.args}:
        return ()
    return tuple(_constant(tree, "PROVIDERS"))


def _constant(tree: ast.Module, name: str) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            yield from ast.literal_eval(node.value)


def test_every_cell_of_the_matrix_names_a_test_that_runs_for_its_provider() -> None:
    head, *matrix = section("What a call carries")
    tests = {row[0]: row[1].strip("`") for row in section("The test of each cell")[1:]}
    assert [row[0] for row in matrix] == list(tests)[: len(matrix)]
    trees = {file.name: ast.parse(file.read_text()) for file in HERE.glob("test_*provider*.py")}
    trees |= {file.name: ast.parse(file.read_text()) for file in HERE.glob("test_prompt_*.py")}
    columns = {api: [name for name, one in SERVICES.items() if one.api == api] for api in head[1:]}
    for capability, named in tests.items():
        file, _, test = named.rpartition("::")
        known = providers_of(trees[file or USUAL], test)
        for api, names in columns.items():
            assert set(names) & set(known), f"{capability} of {api}: {named} runs for {known}"
    assert len(columns) == len(
        {one.api for one in SERVICES.values()} - {"chat completions of Azure"}
    )
