"""Cuts AWS's event streams (application/vnd.amazon.eventstream) into events. Pure.

A frame is its length, the length of its headers and a CRC of both, then headers, payload, and a
CRC of all before it; numbers are big-endian.
"""

import struct
import zlib
from collections.abc import Iterator

import orjson

from stepfleet.worker.models.bodies import malformed

MOST_BYTES = 16 * 1024 * 1024
"""Longest frame that is read, in bytes."""
_MOST_HEADERS = 128 * 1024
_PRELUDE, _CRC = 12, 4
_STRING = 7
_SIZES = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
"""Bytes of a header's value by its type; 6 and 7 state their own length."""


class FrameCutter:
    """Cuts a byte stream into events: JSON objects with the event's kind as their only key.

    An exception is `{"exception": {"type": ..., "body": ...}}`.
    """

    def __init__(self) -> None:
        self._begun = bytearray()

    @staticmethod
    def fits(begin: bytes) -> bool:
        """Return whether a body that begins so is such a stream: a frame has at most 16 MiB."""
        return begin[:1] == b"\0"

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes and return every event that they complete.

        Raises `ModelError` for a broken or too long frame.
        """
        self._begun += chunk
        return list(self._events())

    def end(self) -> list[bytes]:
        """Return nothing: a frame that the stream's end cuts off is no event."""
        return []

    def _events(self) -> Iterator[bytes]:
        while len(self._begun) >= _PRELUDE:
            size, headers, crc = struct.unpack_from("!III", self._begun)
            if crc != zlib.crc32(self._begun[: _PRELUDE - _CRC]):
                raise malformed("the checksum of a frame's length is wrong")
            if size > MOST_BYTES or headers > min(_MOST_HEADERS, size - _PRELUDE - _CRC):
                raise malformed(f"a frame of {size} B has {headers} B of headers")
            if len(self._begun) < size:
                return
            frame = bytes(self._begun[:size])
            del self._begun[:size]
            if zlib.crc32(frame[:-_CRC]) != int.from_bytes(frame[-_CRC:]):
                raise malformed("a frame's checksum is wrong")
            start = _PRELUDE + headers
            yield _event(_headers(frame[_PRELUDE:start]), frame[start:-_CRC])


def _event(headers: dict[str, str], payload: bytes) -> bytes:
    match headers.get(":message-type"):
        case "event":
            return b"{%s:%s}" % (orjson.dumps(headers.get(":event-type", "")), payload or b"{}")
        case "exception":
            kind = orjson.dumps(headers.get(":exception-type", ""))
            return b'{"exception":{"type":%s,"body":%s}}' % (kind, payload or b"{}")
    text = headers.get(":error-message", "an error without a message")
    error = {"type": headers.get(":error-code", "error"), "body": {"message": text}}
    return orjson.dumps({"exception": error})


def _headers(data: bytes) -> dict[str, str]:
    """Return the headers whose values are text."""
    found: dict[str, str] = {}
    at = 0
    try:
        while at < len(data):
            named = at + 1 + data[at]
            name, kind = data[at + 1 : named].decode(), data[named]
            at = named + 1
            if kind in _SIZES:
                at += _SIZES[kind]
                continue
            (size,) = struct.unpack_from("!H", data, at)
            at += 2 + size
            if kind == _STRING:
                found[name] = data[at - size : at].decode()
    except (IndexError, struct.error, UnicodeDecodeError):
        raise malformed("a frame's headers cannot be read") from None
    if at != len(data):
        raise malformed("a frame's headers cannot be read")
    return found
