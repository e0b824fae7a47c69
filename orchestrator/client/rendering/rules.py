"""What of a turn is text for people, and how calls read in short. Pure."""

from collections.abc import Iterable

from stepfleet.orchestrator.client.rendering.messages import UIToolCall


def should_render_assistant_content(content: str, *, has_tool_calls: bool) -> bool:
    """Return whether a model's text is shown.

    Without tool calls it always is; beside them only where it is natural language: not empty,
    and not the beginning of JSON.
    """
    if not has_tool_calls:
        return True
    trimmed = content.strip()
    return bool(trimmed) and not trimmed.startswith(("{", "["))


def indicator(calls: Iterable[UIToolCall]) -> str:
    """Return calls on one line, as `search(query: "lamps"), stock(product: "lamp")`."""
    return ", ".join(f"{call.name}({call.args_summary or ''})" for call in calls)
