"""The samples of docs/tools.md run as they stand there."""

import re
from pathlib import Path
from typing import Any

import pytest

from stepfleet.orchestrator.tools import Tool, ToolOptions, builtin, registry, registry_of

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "tools.md").read_text(encoding="utf-8")


def test_the_samples_of_the_tools_page_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """DOC-03, TOOL-18, TOOL-19, TOOL-22"""
    registry.tool_catalog.cache_clear()
    names: dict[str, Any] = {"__name__": "samples"}
    try:
        for sample in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
            exec(compile(sample, "docs/tools.md", "exec"), names)  # noqa: S102 - our own page
    finally:
        registry.tool_catalog.cache_clear()
    required, searches, versions = capsys.readouterr().out.splitlines()
    assert required == "['city']"
    assert searches == "['search_letters', 'search_notes']"
    assert versions == "('1', '2') 2"
    assert names["artist"].tools.queues == {"render": "gpu"}
    assert names["clerk"].tools.get("population").version == "2"
    assert names["wave"].options.queue == "sound"


def test_the_page_lists_every_option_of_a_tool() -> None:
    """TOOL-03"""
    listed = re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE)
    assert sorted(listed) == sorted(ToolOptions.__dataclass_fields__)


def test_the_tools_that_ship_are_listed_and_are_given_by_their_names() -> None:
    """TOOL-24"""
    shipped = [name for name in builtin.__all__ if isinstance(getattr(builtin, name), Tool)]
    row = next(line for line in protocols() if line.startswith("| `Tool` |"))
    assert re.findall(r"`(\w+)`", row.rpartition("|")[0].rpartition("|")[2]) == shipped
    found = registry_of([f"{builtin.__name__}:{name}" for name in shipped])
    assert [spec.name for spec in found.specs()] == shipped
    assert all(spec.description and spec.parameters["properties"] for spec in found.specs())


def protocols() -> list[str]:
    return (DOCS / "protocols.md").read_text(encoding="utf-8").splitlines()
