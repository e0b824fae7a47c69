"""A turn's tool results as blocks, and as the short text that a history keeps. Pure."""

from collections.abc import Sequence

from stepfleet.orchestrator.records.blocks import RESULT
from stepfleet.orchestrator.records.messages import Block
from stepfleet.orchestrator.records.tools import ToolCallRecord


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


def _text(block: Block) -> str:
    content = block.get(RESULT, {}).get("content", ())
    return "".join(str(part["text"]) for part in content if "text" in part)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit} more)"
