"""Bounds what an MCP server may answer by HTTP: strangers decide how much they send.

Knows nothing of the protocol. Streams of events are bounded per event by the protocol's client.
"""

from collections.abc import AsyncIterator, Mapping

import httpx2

MAX_BODY = 1024 * 1024
"""Bytes of one answer that is no stream of events."""
IDENTITY: Mapping[str, str] = {"Accept-Encoding": "identity"}
"""Asks for bodies as they are: a small compressed one may be of any size."""


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
