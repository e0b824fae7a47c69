"""docs/mcp.md and the example in examples/mcp."""

import inspect
import re
from pathlib import Path
from typing import Any

from stepfleet.orchestrator import WithMedia, mcp_server
from stepfleet.worker.toolbox.mcp.content import MAX_IMAGES, MAX_MEDIA
from stepfleet.worker.toolbox.mcp.listing import MAX_DESCRIPTION, MAX_SCHEMA, MAX_TOOLS
from stepfleet.worker.toolbox.mcp.registry import IDEMPOTENCY_KEY

PAGE = (Path(__file__).parents[4] / "docs" / "mcp.md").read_text(encoding="utf-8")


def test_the_samples_of_the_page_run() -> None:
    """DOC-03"""
    names: dict[str, Any] = {"__name__": "samples"}
    for sample in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(sample, "docs/mcp.md", "exec"), names)  # noqa: S102 - our own page
    assert [one.name for one in names["clerk"].config.mcp_servers] == ["files", "tickets"]
    assert "TICKETS" not in names["clerk"].config.to_json()
    assert isinstance(names["chart"]("x"), WithMedia)


def test_the_page_lists_every_argument() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE)
    assert listed == [one for one in inspect.signature(mcp_server).parameters if one != "name"]


def test_the_page_names_the_limits_that_hold() -> None:
    words = " ".join(PAGE.split())
    assert (MAX_IMAGES, MAX_MEDIA) == (8, 248 * 1024)
    assert "at most eight and 248 KiB of base64 together" in words
    assert f"Descriptions are cut at {MAX_DESCRIPTION:,} characters" in words
    assert f"has more than {MAX_SCHEMA // 1024} KiB" in words
    assert f"those beyond {MAX_TOOLS}" in words
    assert IDEMPOTENCY_KEY in words
