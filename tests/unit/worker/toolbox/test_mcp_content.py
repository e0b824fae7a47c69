"""What an MCP server's answers mean for a run."""

import base64
from typing import Any

import pytest
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from stepfleet.orchestrator import WithMedia
from stepfleet.orchestrator.errors import ToolExecutionError
from stepfleet.worker.toolbox.mcp.content import MAX_IMAGES, MAX_MEDIA, value_of

PNG = base64.b64encode(b"not really").decode()


def text(said: str) -> TextContent:
    return TextContent(type="text", text=said)


def image(data: str = PNG, mime_type: str = "image/png") -> ImageContent:
    return ImageContent(type="image", data=data, mime_type=mime_type)


def value(*content: Any, **fields: Any) -> Any:
    return value_of(CallToolResult(content=list(content), **fields))


def test_texts_are_the_result_a_line_each() -> None:
    assert value(text("one"), text("two")) == "one\ntwo"


@pytest.mark.parametrize(
    ("texts", "structured", "result"),
    [
        (['{\n  "a": 1\n}'], {"a": 1}, {"a": 1}),
        ([], {"a": 1}, {"a": 1}),
        (["3"], {"result": 3}, 3),
        (["seen"], {"content": "seen"}, "seen"),
        (["1", "2"], {"result": [1, 2]}, [1, 2]),
        (["Sunny."], {"sky": "clear"}, {"text": "Sunny.", "structured": {"sky": "clear"}}),
    ],
)
def test_structured_data_is_the_result_where_the_text_repeats_it(
    texts: list[str], structured: Any, result: Any
) -> None:
    assert value(*map(text, texts), structured_content=structured) == result


def test_an_answer_that_is_an_error_fails_the_call_with_the_servers_words() -> None:
    with pytest.raises(ToolExecutionError, match="no such file"):
        value(text("no such file"), is_error=True)
    with pytest.raises(ToolExecutionError, match="without a message"):
        value(is_error=True)


def test_an_image_becomes_a_block_and_a_line_of_the_text() -> None:
    shown = value(text("Look:"), image())
    assert shown == WithMedia(
        "Look:\n[image 1: image/png, 10 bytes, shown below]",
        ({"image": {"format": "png", "source": {"bytes": PNG}}},),
    )


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (image(mime_type="image/x-icon"), "[image left out: image/x-icon is not read by models"),
        (image(data="%%%"), "[image left out: its data is not valid base64]"),
        (image(data="A" * (MAX_MEDIA + 4)), "[image left out: with it the images have more than"),
        (
            AudioContent(type="audio", data=PNG, mime_type="audio/wav"),
            "[audio left out: audio/wav]",
        ),
        (ResourceLink(type="resource_link", name="log", uri="file:///log"), "[resource log: file"),
        (
            EmbeddedResource(
                type="resource",
                resource=BlobResourceContents(uri="file:///a.zip", blob=PNG, mime_type="app/zip"),
            ),
            "[resource left out: file:///a.zip, app/zip]",
        ),
        (
            EmbeddedResource(
                type="resource", resource=TextResourceContents(uri="file:///a", text="inside")
            ),
            "inside",
        ),
    ],
)
def test_what_models_cannot_read_is_named_in_the_text(part: Any, said: str) -> None:
    assert value(part).startswith(said)


def test_of_many_images_some_are_shown() -> None:
    shown = value(*[image()] * (MAX_IMAGES + 1))
    assert len(shown.media) == MAX_IMAGES
    assert shown.result.endswith("[image left out: there are more than 8]")


def test_an_image_among_resources_is_shown_too() -> None:
    blob = BlobResourceContents(uri="file:///a.png", blob=PNG, mime_type="image/png")
    shown = value(EmbeddedResource(type="resource", resource=blob))
    assert len(shown.media) == 1
