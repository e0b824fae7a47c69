"""Turns an MCP server's answer into a tool's result, its images, or an error. Pure."""

import base64
import binascii
import json
from collections.abc import Iterable, Sequence
from typing import Any

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
)

from stepfleet.orchestrator.errors import ToolExecutionError
from stepfleet.orchestrator.records.conversation.messages import Block, value_text
from stepfleet.orchestrator.tools.invocation import WithMedia
from stepfleet.worker.toolbox.results import RESULT_LIMIT

MAX_IMAGES = 8
MAX_MEDIA = RESULT_LIMIT - 8 * 1024
"""Bytes of base64 that the images of one answer may have together."""
_IMAGES = {"image/png": "png", "image/jpeg": "jpeg", "image/gif": "gif", "image/webp": "webp"}
_SHOWN = 200


def value_of(answer: CallToolResult) -> Any:
    """Return a call's result: its text, its structured data, or both where they differ.

    Images are shown to the model behind the result; other binary parts are only named. Raises
    `ToolExecutionError` with the server's words where it calls its answer an error.
    """
    media: list[Block] = []
    texts = list(_texts(answer.content, media))
    if answer.is_error:
        message = "\n".join(texts)
        raise ToolExecutionError(message or "the MCP server reports an error without a message")
    value = _joined(texts, answer.structured_content)
    return WithMedia(value, tuple(media)) if media else value


def _joined(texts: Sequence[str], structured: Any) -> Any:
    """Return structured data alone where the texts only repeat it."""
    text = "\n".join(texts)
    if structured is None:
        return text
    if not text or _repeat(texts, structured):
        return structured
    if isinstance(structured, dict) and len(structured) == 1:
        # Servers wrap other values in an object, since structured content has to be one.
        inner = next(iter(structured.values()))
        if _repeat(texts, inner):
            return inner
    return {"text": text, "structured": structured}


def _repeat(texts: Sequence[str], data: Any) -> bool:
    if len(texts) == 1 and _same(texts[0], data):
        return True
    return (
        isinstance(data, list)
        and len(texts) == len(data)
        and all(_same(text, one) for text, one in zip(texts, data, strict=True))
    )


def _same(text: str, data: Any) -> bool:
    if text == value_text(data):
        return True
    try:
        return bool(json.loads(text) == data)
    except (ValueError, RecursionError):
        return False


def _texts(parts: Iterable[ContentBlock], media: list[Block]) -> Iterable[str]:
    """Yield each part's text; images go to `media`, and a line in the text stands for each."""
    for part in parts:
        match part:
            case TextContent():
                yield part.text
            case ImageContent():
                yield _image(part, media)
            case AudioContent():
                yield f"[audio left out: {_brief(part.mime_type)}]"
            case ResourceLink():
                yield f"[resource {_brief(part.name)}: {_brief(str(part.uri))}]"
            case EmbeddedResource():
                yield _resource(part, media)


def _image(part: ImageContent, media: list[Block]) -> str:
    kind = _IMAGES.get(part.mime_type.lower())
    if kind is None:
        return f"[image left out: {_brief(part.mime_type)} is not read by models]"
    if len(media) >= MAX_IMAGES:
        return f"[image left out: there are more than {MAX_IMAGES}]"
    taken = sum(len(one["image"]["source"]["bytes"]) for one in media)
    if taken + len(part.data) > MAX_MEDIA:
        return f"[image left out: with it the images have more than {MAX_MEDIA} bytes of base64]"
    try:
        size = len(base64.b64decode(part.data, validate=True))
    except (binascii.Error, ValueError):
        return "[image left out: its data is not valid base64]"
    media.append({"image": {"format": kind, "source": {"bytes": part.data}}})
    return f"[image {len(media)}: {part.mime_type.lower()}, {size} bytes, shown below]"


def _resource(part: EmbeddedResource, media: list[Block]) -> str:
    resource = part.resource
    if not isinstance(resource, BlobResourceContents):
        return resource.text
    kind = resource.mime_type or "unknown type"
    if kind.lower() in _IMAGES:
        return _image(ImageContent(type="image", data=resource.blob, mime_type=kind), media)
    return f"[resource left out: {_brief(str(resource.uri))}, {_brief(kind)}]"


def _brief(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
