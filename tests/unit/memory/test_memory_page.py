"""The samples of docs/memory.md run as they stand there."""

import re
from pathlib import Path
from typing import Any

import pytest

from stepfleet.orchestrator import MemoryPolicy, Message, ToolCall

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "memory.md").read_text(encoding="utf-8")
CONFIGURATION = (DOCS / "configuration.md").read_text(encoding="utf-8")


def test_the_samples_of_the_memory_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    """DOC-03, MEM-04, MEM-11"""
    names: dict[str, Any] = {"__name__": "samples"}
    for sample in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(sample, "docs/memory.md", "exec"), names)  # noqa: S102 - our own page
    found, kept = capsys.readouterr().out.splitlines()
    assert found == "- The customer's name is Ada; she prefers letters."
    assert kept == str([f"message {number}" for number in range(16, 21)])
    assert names["researcher"].config.memory.max_tokens == 24_000
    call = ToolCall(id="1", name="look")
    answers = [Message.tool(call, "x" * 500), Message.tool(call, "y" * 500)]
    shortened = names["short_results"](answers, None)
    assert [len(one.text) for one in shortened] == [200, 500]


def test_every_field_of_a_policy_is_explained_and_listed() -> None:
    """MEM-03"""
    assert set(MemoryPolicy.model_fields) <= set(re.findall(r"`(\w+)`", PAGE))
    fields = CONFIGURATION.partition("\n### memory\n")[2].partition("\n### ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", fields, flags=re.MULTILINE)
    assert listed == list(MemoryPolicy.model_fields)
