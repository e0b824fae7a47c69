"""A turn as a strategy's history keeps it: fields of the model's object, calls, tool results. Pure.

Nothing here raises.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.conversation.blocks import RESULT
from stepfleet.orchestrator.records.conversation.messages import Block


def result_blocks(records: Sequence[ToolCallRecord], texts: Sequence[str]) -> tuple[Block, ...]:
    """Return one `toolResult` block per call, in call order."""
    return tuple(
        {
            RESULT: {
                "toolUseId": record.call_id,
                "content": [{"text": text}],
                "status": "error" if record.is_error else "success",
            }
        }
        for record, text in zip(records, texts, strict=True)
    )


def observation_of(blocks: Sequence[Block], limit: int) -> str | None:
    """Return the texts of the results, each at most `limit` characters; None without results."""
    if not blocks:
        return None
    return "\n".join(_shortened(_text(block), limit) for block in blocks)


def text_field(parsed: Mapping[str, Any], name: str) -> str:
    """Return a field as text: "" where it is missing, JSON where it is no text."""
    value = parsed.get(name)
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def says_yes(value: Any) -> bool:
    """Return whether a field means true; models write it as text as well."""
    return value is True or (isinstance(value, str) and value.strip().lower() in {"true", "yes"})


def action_of(calls: Sequence[ToolCall]) -> Any:
    """Return the calls as a history keeps them: None, the only one, or a list."""
    actions = [{"tool": call.name, "arguments": call.arguments} for call in calls]
    if len(actions) > 1:
        return actions
    return actions[0] if actions else None


def _text(block: Block) -> str:
    content = block.get(RESULT, {}).get("content", ())
    return "".join(str(part["text"]) for part in content if "text" in part)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit} more)"
