"""A tool of types that are local to a function, in a module whose hints are all text."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from stepfleet.orchestrator import tool
from stepfleet.orchestrator.tools.definition import Tool


def tool_of_local_types() -> Tool[..., Any]:
    """Return a tool two functions deep."""
    Way = Literal["up", "down"]  # noqa: N806 - a type

    def inner() -> Tool[..., Any]:
        class Local(BaseModel):
            size: int

        @tool
        def probe(given: Local, way: Way) -> int:
            """Probe."""
            return given.size + len(way)

        return probe

    return inner()
