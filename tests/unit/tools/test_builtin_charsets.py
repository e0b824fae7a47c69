"""Charsets that pages name: those that pages have, and others as UTF-8."""

import asyncio
import codecs

import pytest

from stepfleet.orchestrator.tools import web
from stepfleet.orchestrator.tools.web import CHUNK, charset_of, decoded


@pytest.mark.parametrize(
    ("content_type", "codec"),
    [
        ("text/html", "utf_8"),
        ("text/html; charset=UTF-8", "utf_8"),
        ("text/html; charset='windows-1252'", "cp1252"),
        ('text/html; CHARSET = "ISO-8859-15"; x=y', "iso8859_15"),
        ("text/html; charset=Shift_JIS", "shift_jis"),
        ("text/html; charset=koi8-r", "koi8_r"),
        ("text/html; charset=punycode", "utf_8"),
        ("text/html; charset=rot13", "utf_8"),
        ("text/html; charset=" + "x" * 1_000_000, "utf_8"),
        ("text/html" + ';"' * 500_000 + "; charset=latin-1", "utf_8"),
    ],
)
def test_a_content_type_names_an_allowed_codec(content_type: str, codec: str) -> None:
    """TOOL-24"""
    assert charset_of(content_type) == codec


@pytest.mark.parametrize("codec", sorted(web._ALLOWED))
async def test_every_codec_decodes_in_pieces_what_it_decodes_whole(codec: str) -> None:
    """TOOL-24: bytes of all kinds, with a character across two pieces."""
    body = b"a" * (CHUNK - 1) + bytes(range(256)) * 40 + "né日".encode(codec, "replace") * 99
    body += b"\x81\x8f\xa1\xff\x1b$B" * 500
    assert await decoded(body, codec) == body.decode(codec, "replace")


@pytest.mark.parametrize(
    ("mark", "codec"),
    [
        (codecs.BOM_UTF8, "utf_8"),
        (codecs.BOM_UTF16_LE, "utf_16_le"),
        (codecs.BOM_UTF16_BE, "utf_16_be"),
    ],
)
async def test_a_byte_order_mark_decides(mark: bytes, codec: str) -> None:
    assert await decoded(mark + "Grüße".encode(codec), "latin_1") == "Grüße"


async def test_others_have_their_turn_while_a_page_is_decoded() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await decoded(b"\xff" * 1024 * 1024, "cp1255")
    task.cancel()
    assert turns >= 1024 * 1024 // CHUNK - 1
