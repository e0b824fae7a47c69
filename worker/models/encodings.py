"""Reads the bytes of a body whatever its label says: compressed or not. Pure but for its source.

Bodies are asked for as they are. Servers and proxies compress them all the same, name that in
words of their own or not at all, or name what they have not done.
"""

import codecs
import zlib
from collections.abc import AsyncIterator, Iterator

from stepfleet.worker.models.bodies import malformed

_TELLING = 2
"""Bytes that tell how a body is encoded."""
_PIECE = 64 * 1024
"""Largest piece that is unpacked at once: readers count what they get and stop."""
_GZIP = b"\x1f\x8b"
_GZIP_BITS, _ZLIB_BITS, _RAW_BITS = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
_NONE = frozenset({"", "identity", "gzip", "x-gzip", "utf-8", "none"})
"""Labels of bodies that are readable without any magic bytes."""


async def plain(parts: AsyncIterator[bytes], label: str) -> AsyncIterator[bytes]:
    """Yield the parts of a body unpacked; `label` is its content-encoding.

    Raises `ModelError` for an encoding that is not read, and for bytes that are none.
    """
    begin = b""
    async for part in parts:
        begin += part
        if len(begin) >= _TELLING:
            break
    bits = _bits(begin, label)
    if bits is None:
        yield begin
        async for part in parts:
            yield part
        return
    unpacking = _Unpacking(bits)
    try:
        for piece in unpacking.feed(begin):
            yield piece
        async for part in parts:
            for piece in unpacking.feed(part):
                yield piece
    except zlib.error:
        raise malformed("its compressed bytes are broken") from None


class _Unpacking:
    """Unpacks the members of a compressed body, one behind the other."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._member = zlib.decompressobj(bits)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what the next bytes unpack to, in pieces of a bounded size."""
        is_full = False
        while data or is_full:
            if self._member.eof:
                if not data.startswith(_GZIP):  # padding
                    return
                self._member = zlib.decompressobj(self._bits)
            if piece := self._member.decompress(data, _PIECE):
                yield piece
            is_full = len(piece) == _PIECE and not self._member.eof
            data = self._member.unused_data if self._member.eof else self._member.unconsumed_tail


def _bits(begin: bytes, label: str) -> int | None:
    """Return how zlib reads a body that begins so; None for one that is read as it is."""
    named = {one.strip().lower() for one in label.split(",")}
    if begin.startswith(_GZIP):
        return _GZIP_BITS
    if named <= _NONE or not begin or _is_text(begin):
        return None
    if "deflate" in named:
        has_header = begin[0] & 0xF == zlib.DEFLATED and int.from_bytes(begin[:2]) % 31 == 0
        return _ZLIB_BITS if has_header else _RAW_BITS
    raise malformed(f"its body is encoded as {label[:40]!r}, which was not asked for")


def _is_text(begin: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begin)
    except UnicodeDecodeError:
        return False
    return True
