import ast
from pathlib import Path

import stepfleet.orchestrator.tools
import stepfleet.worker.toolbox

WORKER = Path(str(stepfleet.worker.toolbox.__file__)).parents[1]
ORCHESTRATOR = Path(str(stepfleet.orchestrator.tools.__file__)).parents[1]


def places_that_name(attribute: str, below: Path) -> set[str]:
    return {
        file.relative_to(below).as_posix()
        for file in below.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr == attribute)
        or (isinstance(node, ast.Name) and node.id == attribute)
    }


def test_one_module_runs_tools_and_one_function_calls_it() -> None:
    """TOOL-09: code inspection; every execution passes through execute_call."""
    assert places_that_name("run_tool", WORKER) == {"toolbox/execution.py"}


def test_the_parser_of_arguments_is_used_by_the_one_parser_of_calls_alone() -> None:
    """TOOL-06: code inspection; the JSON of answers is read elsewhere, that of calls is not."""
    users = places_that_name("load_bounded", ORCHESTRATOR) | places_that_name(
        "load_bounded", WORKER
    )
    of_answers = {"tools/schemas/bounded_json.py", "agents/strategies/json_mode.py"}
    assert users - of_answers == {"tools/calls.py"}
