"""Cuts server-sent events out of a byte stream, whatever its encoding. Pure."""

import codecs
import re
import zlib
from collections.abc import Iterable, Iterator

import orjson

from stepfleet.worker.models.bodies import malformed

_TELLING = 2
"""Bytes that tell how a body is encoded."""
_PIECE = 64 * 1024
"""Largest piece that is unpacked at once: readers count what they get and stop."""
_GZIP = b"\x1f\x8b"
_GZIP_BITS, _ZLIB_BITS, _RAW_BITS = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
_NONE = frozenset({"", "identity", "gzip", "x-gzip", "utf-8", "none"})
"""Labels of bodies that are readable without any magic bytes."""


class Body:
    """Unpacks a body part by part, whatever its encoding; `label` is its content-encoding.

    A body of one byte is none: no answer is that short.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._begin: bytes | None = b""
        self._unpacking: _Unpacking | None = None

    def feed(self, part: bytes) -> Iterable[bytes]:
        """Return what the next part unpacks to.

        Raises `ModelError` for an encoding that is not read, and for bytes that are none.
        """
        if self._begin is not None:
            part = self._begin + part
            if len(part) < _TELLING:
                self._begin = part
                return ()
            self._begin = None
            bits = _bits(part, self._label)
            self._unpacking = None if bits is None else _Unpacking(bits)
        return (part,) if self._unpacking is None else self._unpacking.feed(part)


class _Unpacking:
    """Unpacks the members of a compressed body, one after the other."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._member = zlib.decompressobj(bits)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what the next bytes unpack to, in pieces of a bounded size.

        Raises `ModelError` where they are broken.
        """
        is_full = False
        while data or is_full:
            if self._member.eof:
                if not data.startswith(_GZIP):  # padding
                    return
                self._member = zlib.decompressobj(self._bits)
            try:
                piece = self._member.decompress(data, _PIECE)
            except zlib.error:
                raise malformed("its compressed bytes are broken") from None
            if piece:
                yield piece
            is_full = len(piece) == _PIECE and not self._member.eof
            data = self._member.unused_data if self._member.eof else self._member.unconsumed_tail


def _bits(begin: bytes, label: str) -> int | None:
    """Return how zlib reads a body that begins so; None for one that is read as it is."""
    if begin.startswith(_GZIP):
        return _GZIP_BITS
    if not label:
        return None
    named = {one.strip().lower() for one in label.split(",")}
    if named <= _NONE or _is_text(begin):
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


_FIELDS = (b":", b"event:", b"id:", b"retry:", b"error:")
_EVENTS_BEGIN = (b"data:", *_FIELDS)
_LONGEST_FAILURE = 64 * 1024
_TYPED = b'{"type":'
_NAME = re.compile(rb"[\w.-]{1,100}")


class EventLines:
    """Cuts a byte stream into the data of its server-sent events.

    Lines end with CR, LF or both. The data of an event that is named `error`, and an `error:` line,
    come out as `{"error": ...}`, whatever they are. So does JSON between events with an `error`.
    An object without a `type` gets the event's name as its own.
    """

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        self._data: list[bytes] = []
        self._bare: list[bytes] = []
        self._is_cut: bool | None = None
        self._name = b""
        self._after_cr = False

    @staticmethod
    def fits(begin: bytes) -> bool:
        """Return whether a body that begins so is such a stream."""
        return begin.lstrip().startswith(_EVENTS_BEGIN)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes and return the data of every event that they complete."""
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        head, newline, rest = chunk.rpartition(b"\n")
        if not newline:
            self._begun.append(chunk)
            return []
        lines = b"".join([*self._begun, head]).split(b"\n")
        self._begun = [rest]
        return [data for line in lines for data in self._line(line)]

    def end(self) -> list[bytes]:
        """Return the data of an event that the stream's end completes."""
        return self.feed(b"\n\n")

    def _line(self, line: bytes) -> Iterator[bytes]:
        if line.startswith(b"data:"):
            self._keep(line[5:].removeprefix(b" "))
        elif not line:
            if self._data and (data := b"\n".join(self._data).strip()):
                yield _failure(data) if self._name == b"error" else _typed(data, self._name)
            self._data.clear()
            self._name = b""
            if self._bare:
                yield from self._bare_failure()
        elif line.startswith(b"error:"):
            yield _failure(line[6:].strip())
        elif line.startswith(_FIELDS):
            if line.startswith(b"event:"):
                self._name = line[6:].strip()
        elif self._data and self._goes_on():
            # A line break that the server did not escape: the text goes on.
            self._keep(line)
        elif self._bare or line.startswith(b"{"):
            self._bare.append(line)

    def _bare_failure(self) -> Iterator[bytes]:
        """Yield the error that a server wrote between events: Gemini's are not events."""
        data = b"\n".join(self._bare)
        self._bare.clear()
        try:
            said = orjson.loads(data[:_LONGEST_FAILURE])
        except orjson.JSONDecodeError:
            return
        if isinstance(said, dict) and said.get("error"):
            yield _failure(data)

    def _keep(self, line: bytes) -> None:
        self._data.append(line)
        self._is_cut = None

    def _goes_on(self) -> bool:
        # Once per line: those that follow would look at it again, however long it is.
        if self._is_cut is None:
            begins = self._data[0].startswith(b"{")
            self._is_cut = begins and not self._data[-1].rstrip().endswith(b"}")
        return self._is_cut


def _typed(data: bytes, name: bytes) -> bytes:
    """Return the event with its name as its type; the type that it has comes later, and counts."""
    if not data.startswith(b"{") or data.startswith(_TYPED) or not _NAME.fullmatch(name):
        return data
    rest = data[1:].lstrip()
    return b'%s"%s"%s%s' % (_TYPED, name, b"" if rest.startswith(b"}") else b",", rest)


def _failure(data: bytes) -> bytes:
    """Return the event of a failure whose data may be JSON, or words."""
    data = data[:_LONGEST_FAILURE]
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        data = orjson.dumps(data.decode(errors="replace"))
    return b'{"type":"error","error":%s}' % data
