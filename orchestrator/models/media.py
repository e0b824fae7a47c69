"""Images, documents and audio in messages: one normalized form, and the ways into it. Pure.

    {"image": {"format": "png", "source": {"bytes": "<base64>"}}}
    {"document": {"format": "pdf", "name": "a.pdf", "source": {"url": "https://..."}}}
    {"audio": {"format": "wav", "source": {"bytes": "<base64>"}}}

A source is one of `bytes`, `url`, `file_id` (a file that the provider keeps) and, for documents,
`text`. Parts in the forms of OpenAI's and Anthropic's requests become blocks like these; a part
with fields that only its own provider knows stays as it is.
"""

import binascii
import mimetypes
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from stepfleet.orchestrator.records.conversation.messages import Block, Content

KINDS = ("image", "document", "audio")
_USUAL = {"image": "png", "document": "pdf", "audio": "wav"}
_SOURCES = ("bytes", "url", "text", "file_id")
_OFFICE = "application/vnd.openxmlformats-officedocument."
_MEDIA_TYPES = {
    "jpg": "image/jpeg",
    "pdf": "application/pdf",
    "json": "application/json",
    "docx": f"{_OFFICE}wordprocessingml.document",
    "pptx": f"{_OFFICE}presentationml.presentation",
    "xlsx": f"{_OFFICE}spreadsheetml.sheet",
    "txt": "text/plain",
    "md": "text/markdown",
    "csv": "text/csv",
    "html": "text/html",
}
_FORMATS = {media_type: form for form, media_type in _MEDIA_TYPES.items()} | {
    "image/jpeg": "jpeg",
    "audio/mpeg": "mp3",
    "audio/x-wav": "wav",
    "audio/wave": "wav",
}
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[^;,]*)*;base64,", re.ASCII)
_CALLS = {"toolUse": {"toolUseId", "name"}, "toolResult": {"toolUseId"}}
_NESTING = ("image_url", "input_audio")
_ROUND = {"bytes": "base64 data", "url": "an address", "text": "text", "file_id": "a file's id"}


@dataclass(frozen=True, slots=True)
class Media:
    """One image, document or audio; `value` is the base64, address, text or id of its `source`."""

    kind: str
    form: str
    source: str
    value: str
    name: str = "document"
    detail: str = "auto"
    """How closely OpenAI's models look at an image; others have no such choice."""

    @property
    def media_type(self) -> str:
        """Its media type, such as `image/png`."""
        other = "application" if self.kind == "document" else self.kind
        return _MEDIA_TYPES.get(self.form, f"{other}/{self.form}")

    @property
    def data(self) -> str:
        """Its base64, or ""."""
        return self.value if self.source == "bytes" else ""

    @property
    def url(self) -> str:
        """Its address, or ""."""
        return self.value if self.source == "url" else ""

    @property
    def address(self) -> str:
        """Its address, or its bytes as a data URL."""
        return self.url or f"data:{self.media_type};base64,{self.data}"

    def __str__(self) -> str:
        """Return its kind, for messages."""
        return f"{self.kind} ({self.media_type}, {_ROUND[self.source]})"


def media_of(block: Block) -> Media | None:
    """Return the image, document or audio of a normalized block; None for other blocks.

    Raises `ValueError` where it lacks a usable source.
    """
    kind = next((one for one in KINDS if one in block), None)
    if kind is None or "type" in block:
        return None
    media = block[kind] if isinstance(block[kind], dict) else {}
    source = media.get("source")
    given = source if isinstance(source, Mapping) else {}
    name = next((one for one in _SOURCES if isinstance(given.get(one), str) and given[one]), None)
    if name is None or (name == "text" and kind != "document"):
        raise ValueError(f"{kind} needs a source: {{'bytes': '<base64>'}} or {{'url': 'https://'}}")
    value = given[name]
    named = str(media.get("name") or "document")
    form = media.get("format") or _format_of(media.get("media_type"))
    if not form and name == "url":
        form = _format_of(mimetypes.guess_type(urlsplit(value).path)[0])
    usual = "txt" if name == "text" else _USUAL[kind]
    detail = str(media.get("detail") or "auto")
    found = Media(kind, str(form or usual).lower(), name, value, named, detail)
    return _read(found) if kind == "document" and found.media_type.startswith("text/") else found


def check_media(media: Media) -> None:
    """Raise `ValueError`, with the fix, where bytes are not base64 or an address is invalid."""
    if media.source == "bytes":
        try:
            binascii.a2b_base64(media.value, strict_mode=True)
        except ValueError:  # characters beyond ASCII too
            msg = f"{media.kind}'s bytes are not valid base64; encode them with base64.b64encode"
            raise ValueError(msg) from None
    elif media.source == "url" and not re.match(r"(?:https?|gs|s3)://[^\s/]", media.value):
        raise ValueError(f"{media.kind}'s url must begin with https://, or be a data URL")


def normalized(content: Content) -> Content:
    """Return the content with normalized blocks, also in `toolResult`s.

    Raises `ValueError` where a block is broken, with its place and the fix.
    """
    if isinstance(content, str):
        return content
    found: list[Block] = []
    for index, block in enumerate(content):
        try:
            found.append(normalized_block(block))
        except ValueError as error:
            raise ValueError(f"content.{index}: {error}") from None
    return found


def normalized_block(block: Block) -> Block:
    """Return one block in the normalized form; blocks of other kinds as they are.

    Raises `ValueError` where it is broken.
    """
    for name, fields in _CALLS.items():
        if name in block and not (isinstance(block[name], dict) and fields <= block[name].keys()):
            raise ValueError(f"{name} must be an object with {' and '.join(sorted(fields))}")
    result = block.get("toolResult")
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        return {**block, "toolResult": {**result, "content": normalized(result["content"])}}
    found = _part(block) or block
    media = media_of(found)
    if media is not None:
        check_media(media)
    return found


def _part(part: Block) -> Block | None:
    """Return the block of a part of another interface; None where it stays as it is."""
    kind = part.get("type")
    read = _PARTS.get(kind) if isinstance(kind, str) else None
    try:
        return read(part) if read else None
    except (AttributeError, KeyError, TypeError):
        msg = f"part of type {kind!r} lacks its data; compare it with its interface's reference"
        raise ValueError(msg) from None


def _read(media: Media) -> Media:
    """Return a document of text with its text: no provider needs that as base64."""
    if media.source != "bytes":
        return media
    try:
        text = binascii.a2b_base64(media.value, strict_mode=True).decode()
    except ValueError:
        raise ValueError(f"document of {media.media_type} must be UTF-8 text in base64") from None
    return Media("document", media.form, "text", text, media.name)


def _format_of(media_type: Any) -> str:
    if not isinstance(media_type, str):
        return ""
    known = media_type.partition(";")[0].strip().lower()
    return _FORMATS.get(known) or known.partition("/")[2]


def _from_url(kind: str, url: str, name: str = "", form: str = "") -> Block:
    """Return the block of an address or a data URL."""
    media: dict[str, Any] = {"name": name} if name else {}
    if found := _DATA_URL.match(url):
        given = _format_of(found[1]) or form
        media |= {"format": given} if given else {}
        return {kind: {**media, "source": {"bytes": url[found.end() :]}}}
    return {kind: {**media, "source": {"url": url}}}


def _text(part: Block) -> Block | None:
    return {"text": str(part["text"])} if part.keys() <= {"type", "text", "annotations"} else None


def _image_url(part: Block) -> Block | None:
    image = part["image_url"]
    inner = {"url": image} if isinstance(image, str) else image
    if not _is_plain(part, inner, "url", "detail"):
        return None
    block = _from_url("image", str(inner["url"]))
    if detail := inner.get("detail") or part.get("detail"):
        block["image"]["detail"] = str(detail)
    return block


def _input_audio(part: Block) -> Block | None:
    audio = part["input_audio"]
    media = {"format": str(audio.get("format", "wav")), "source": {"bytes": audio["data"]}}
    return {"audio": media} if _is_plain(part, audio, "data", "format") else None


def _file(part: Block) -> Block | None:
    file = part["file"] if part["type"] == "file" else part
    name = str(file.get("filename", ""))
    if file.get("file_id"):
        kind = "image" if part["type"] == "input_image" else "document"
        return {kind: {"source": {"file_id": file["file_id"]}}}
    if url := file.get("file_url"):
        return _from_url("document", str(url), name)
    form = _format_of(mimetypes.guess_type(name)[0])
    data = str(file["file_data"])
    url = data if data.startswith("data:") else f"data:;base64,{data}"
    return _from_url("document", url, name, form)


def _input_image(part: Block) -> Block | None:
    return _image_url(part) if part.get("image_url") else _file(part)


def _source(part: Block) -> Block | None:
    """Read an image or document of Anthropic's."""
    source, kind = part["source"], str(part["type"])
    media: dict[str, Any] = {"name": part["title"]} if part.get("title") else {}
    if not part.keys() <= {"type", "source", "title"}:
        return None
    match source.get("type"):
        case "base64":
            given = {"format": _format_of(source["media_type"])}
            return {kind: {**given, **media, "source": {"bytes": source["data"]}}}
        case "url":
            return {kind: {**media, "source": {"url": source["url"]}}}
        case "text":
            return {kind: {"format": "txt", **media, "source": {"text": source["data"]}}}
        case "file":
            return {kind: {**media, "source": {"file_id": source["file_id"]}}}
    return None


def _is_plain(part: Block, inner: Mapping[str, Any], *fields: str) -> bool:
    """Return whether a part has no fields but these."""
    return inner.keys() <= {*fields} and part.keys() <= {"type", *_NESTING, "detail"}


_PARTS: Mapping[str, Callable[[Block], Block | None]] = {
    "text": _text,
    "input_text": _text,
    "output_text": _text,
    "image_url": _image_url,
    "input_audio": _input_audio,
    "file": _file,
    "input_image": _input_image,
    "input_file": _file,
    "image": _source,
    "document": _source,
}
