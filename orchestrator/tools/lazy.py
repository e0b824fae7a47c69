"""Tools whose code is imported at their first call; name, description and schema are given here.

For tools whose imports are slow or large, or installed only on the machines of their queue.
"""

import threading
from collections.abc import Mapping
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.references import load_reference
from stepfleet.orchestrator.tools.definition import Tool, ToolOptions, as_tool
from stepfleet.orchestrator.tools.schemas.checks import checker_of


def lazy_tool(
    reference: str,
    *,
    name: str,
    description: str,
    schema: Mapping[str, Any],
    **options: Any,
) -> Tool[..., Any]:
    """Return a tool that `module:attribute` names, without importing it.

    `schema` is the JSON Schema of its arguments, `options` are the fields of `ToolOptions`; the
    code's own options are ignored. The first call imports it, in a thread, and its own
    check sees the arguments as well. Raises `ConfigurationError` for a reference without `:`.
    """
    module, _, attribute = reference.partition(":")
    if not module or not attribute:
        raise ConfigurationError(f"tool {name!r}: write module:attribute, not {reference!r}")
    return Tool(
        name=name,
        description=description,
        schema=schema,
        function=_LazyFunction(reference),
        check=checker_of(name, schema),
        options=ToolOptions(**options),
    )


class _LazyFunction:
    """The function of a tool that is not imported yet."""

    takes_time = True

    def __init__(self, reference: str) -> None:
        self._reference = reference
        self._loaded: Tool[..., Any] | None = None
        self._loading = threading.Lock()

    def __call__(self, **arguments: Any) -> Any:
        if self._loaded is None:
            with self._loading:
                self._loaded = self._loaded or as_tool(load_reference(self._reference, "tool"))
        tool = self._loaded
        return tool.function(**tool.check(arguments))
