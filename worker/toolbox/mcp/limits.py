"""Bounds the answers of MCP servers, which are strangers: lines of standard output, HTTP bodies.

The protocol's client gathers a line until it ends, whatever its length, and copies what it has
with each piece. It has no limit to set, but takes the name of an encoding: this one is UTF-8
without the rest of lines that are too long. The rest of such a line is not a message, which the
client logs; the call that waits for it ends by its timeout. Streams of HTTP events are bounded per
event by the protocol's client.
"""

import codecs
from collections.abc import AsyncIterator, Mapping
from functools import cache

import httpx2

ENCODING = "stepfleet-lines"
MAX_LINE = 4 * 1024 * 1024
"""Bytes of a message."""


class LineDecoder(codecs.IncrementalDecoder):
    """Decodes UTF-8 and leaves out what a line has beyond `MAX_LINE` bytes."""

    def __init__(self, errors: str = "strict") -> None:
        super().__init__(errors)
        self._utf_8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._length = 0

    def decode(self, data: object, final: bool = False) -> str:
        """Return the text of the next bytes."""
        kept = b"\n".join(self._bounded(bytes(data)))  # type: ignore[call-overload]
        return self._utf_8.decode(kept, final)

    def reset(self) -> None:
        """Begin anew."""
        self._utf_8.reset()
        self._length = 0

    def _bounded(self, data: bytes) -> list[bytes]:
        first, *others = data.split(b"\n")
        kept = [first[: max(0, MAX_LINE - self._length)]]
        self._length += len(first)
        for line in others:
            kept.append(line[:MAX_LINE])
            self._length = len(line)
        return kept


@cache
def register_lines() -> None:
    """Make the encoding known to this process."""
    utf_8 = codecs.lookup("utf-8")
    info = codecs.CodecInfo(
        utf_8.encode, utf_8.decode, incrementaldecoder=LineDecoder, name=ENCODING
    )
    names = {ENCODING, ENCODING.replace("-", "_")}
    codecs.register(lambda name: info if name in names else None)


MAX_BODY = 1024 * 1024
"""Bytes of one answer that is not a stream of events."""
IDENTITY: Mapping[str, str] = {"Accept-Encoding": "identity"}
"""Requests uncompressed bodies: a small compressed one may be of any size."""


class BodyTooLargeError(httpx2.StreamError):
    """A server's answer is larger than the limit, or compressed."""


class BoundedTransport(httpx2.AsyncHTTPTransport):
    """HTTP whose bodies end in `BodyTooLargeError` where they are too large."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; its answer's body is bounded as it is read."""
        response = await super().handle_async_request(request)
        kind = response.headers.get("content-type", "").lower()
        if isinstance(response.stream, httpx2.AsyncByteStream):
            compressed = response.headers.get("content-encoding", "identity") != "identity"
            limit = None if kind.startswith("text/event-stream") else MAX_BODY
            response.stream = _Bounded(response.stream, 0 if compressed else limit)
        return response


class _Bounded(httpx2.AsyncByteStream):
    """A stream of at most `limit` bytes; None means that events are bounded elsewhere."""

    def __init__(self, stream: httpx2.AsyncByteStream, limit: int | None) -> None:
        self._stream = stream
        self._limit = limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._stream:
            size += len(part)
            if self._limit is not None and size > self._limit:
                raise BodyTooLargeError(
                    f"the answer is compressed or has more than {MAX_BODY} bytes; return less"
                )
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
