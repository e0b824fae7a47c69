"""Parts in the forms of other interfaces become blocks; broken ones are refused."""

import base64
from typing import Any

import pytest

from stepfleet.orchestrator.batches.files.lines import parse_input
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.media import media_of, normalized_block

DOT = "iVBORw0KGgo="
PICTURE = {"image": {"format": "png", "source": {"bytes": DOT}}}


@pytest.mark.parametrize(
    ("part", "block"),
    [
        ({"type": "text", "text": "hi"}, {"text": "hi"}),
        ({"type": "input_text", "text": "é"}, {"text": "é"}),
        ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DOT}"}}, PICTURE),
        (
            {"type": "image_url", "image_url": {"url": "https://x/a.webp", "detail": "low"}},
            {"image": {"source": {"url": "https://x/a.webp"}, "detail": "low"}},
        ),
        ({"type": "input_image", "image_url": f"data:image/png;base64,{DOT}"}, PICTURE),
        ({"type": "input_image", "file_id": "f-1"}, {"image": {"source": {"file_id": "f-1"}}}),
        (
            {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "mp3"}},
            {"audio": {"format": "mp3", "source": {"bytes": "UklGRg=="}}},
        ),
        (
            {"type": "file", "file": {"filename": "a.pdf", "file_data": "JVBERi0="}},
            {"document": {"name": "a.pdf", "format": "pdf", "source": {"bytes": "JVBERi0="}}},
        ),
        ({"type": "file", "file": {"file_id": "f"}}, {"document": {"source": {"file_id": "f"}}}),
        (
            {"type": "input_file", "file_url": "https://x/a.pdf"},
            {"document": {"source": {"url": "https://x/a.pdf"}}},
        ),
        (
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": DOT},
            },
            PICTURE,
        ),
        (
            {"type": "document", "title": "t", "source": {"type": "text", "data": "Hi."}},
            {"document": {"format": "txt", "name": "t", "source": {"text": "Hi."}}},
        ),
    ],
)
def test_a_part_of_another_interface_becomes_a_block(
    part: dict[str, Any], block: dict[str, Any]
) -> None:
    assert normalized_block(part) == block
    nested = {"toolResult": {"toolUseId": "c", "content": [part]}}
    assert normalized_block(nested) == {"toolResult": {"toolUseId": "c", "content": [block]}}


@pytest.mark.parametrize(
    "block",
    [
        {"text": "hi"},
        {"hologram": {"x": 1}},
        {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}},
        {"type": "search_result", "source": "x"},
        {"image": {"source": {"url": "https://x/y"}}},
    ],
)
def test_what_only_its_own_provider_knows_stays_as_it_is(block: dict[str, Any]) -> None:
    assert normalized_block(block) == block


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"image": {"source": {"bytes": "no base64!"}}}, "encode them with base64.b64encode"),
        ({"image": {"source": {"bytes": "-_-_"}}}, "encode them with base64.b64encode"),
        ({"image": {"source": {"url": "a.png"}}}, "url must begin with https://"),
        ({"image": {"source": {}}}, "image needs a source"),
        ({"image": "x"}, "image needs a source"),
        ({"toolResult": "x"}, "toolResult must be an object with toolUseId"),
        ({"toolUse": {"toolUseId": "c"}}, "toolUse must be an object with name and toolUseId"),
        ({"image": {"source": {"text": "x"}}}, "image needs a source"),
        ({"document": {"format": "txt", "source": {"bytes": "/w=="}}}, "UTF-8 text in base64"),
        ({"type": "image_url"}, "lacks its data"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,x"}}, "url must begin"),
        ({"type": "image", "source": {"type": "base64", "data": "x"}}, "lacks its data"),
        ({"type": "input_audio", "input_audio": None}, "lacks its data"),
    ],
)
def test_a_broken_block_is_refused_with_its_place(part: dict[str, Any], problem: str) -> None:
    given = [{"role": "user", "content": [{"text": "see"}, part]}]
    with pytest.raises(ConfigurationError) as raised:
        parse_input(given, "input")
    assert str(raised.value).startswith("field 'input.0': content.1: ")
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("block", "media_type"),
    [
        ({"image": {"source": {"url": "https://x/a.jpg?size=1"}}}, "image/jpeg"),
        ({"image": {"media_type": "image/webp", "source": {"bytes": DOT}}}, "image/webp"),
        ({"audio": {"format": "WAV", "source": {"bytes": DOT}}}, "audio/wav"),
        ({"document": {"format": "docx", "source": {"bytes": DOT}}}, "application/vnd.openxml"),
    ],
)
def test_media_have_their_type(block: dict[str, Any], media_type: str) -> None:
    media = media_of(block)
    assert media is not None
    assert media.media_type.startswith(media_type)


def test_a_document_of_text_is_read() -> None:
    data = base64.b64encode("Straße".encode()).decode()
    media = media_of({"document": {"format": "md", "name": "a", "source": {"bytes": data}}})
    assert media is not None
    assert (media.source, media.value, media.name) == ("text", "Straße", "a")
