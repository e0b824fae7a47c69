"""A model server for tests that answers with raw bytes: any status, any body, any way to break.

Speaks just enough HTTP/1.1 to be called; keeps what it was sent.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Received:
    """One request as it came in; header names are in lower case."""

    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        """The request's JSON object."""
        parsed: dict[str, Any] = orjson.loads(self.raw)
        return parsed


class RawModelServer:
    """Answers each request with the next script; the last one repeats."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.connections = 0
        self.open_connections = 0
        self._scripts: list[Script] = []
        self._port = 0
        self._serving: set[asyncio.Task[Any]] = set()

    @property
    def base_url(self) -> str:
        """What a client sets as its base URL."""
        return f"http://127.0.0.1:{self._port}/v1"

    def answers(self, *scripts: Script) -> None:
        """Set what the next requests get."""
        self._scripts = list(scripts)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["RawModelServer"]:
        """Serve until the block ends."""
        server = await self._listen()
        try:
            yield self
        finally:
            server.close()
            for connection in self._serving:
                connection.cancel()
            await asyncio.gather(*self._serving)

    async def _listen(self) -> asyncio.Server:
        # Below the ephemeral range: there a client that retries a dead port can reach itself.
        for port in random.sample(range(20_000, 32_000), 50):
            with contextlib.suppress(OSError):
                server = await asyncio.start_server(self._serve, "127.0.0.1", port)
                self._port = port
                return server
        raise AssertionError("no free port below 32768")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        expected = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        try:
            with contextlib.suppress(*expected):
                while not writer.is_closing():
                    self.received.append(await _request(reader))
                    script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
                    await script(writer)
                    await writer.drain()
        finally:
            self.open_connections -= 1
            self._serving.discard(task)
            writer.close()


async def _request(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {}
    for line in head[1:]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    raw = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(path=head[0].split(" ")[1], headers=headers, raw=raw)


def reply(status: int, body: Any, headers: dict[str, str] | None = None) -> Script:
    """Answer with a status and a body: bytes as they are, anything else as JSON."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    fields = {"Content-Type": "application/json", "Content-Length": str(len(data))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in (fields | (headers or {})).items())

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status} Status\r\n{lines}\r\n".encode() + data)

    return script


def completion(content: str | None = "hello", **changes: Any) -> Script:
    """Answer with a sound completion; `changes` replace fields of its message."""
    return reply(200, completion_body(content, **changes))


def completion_body(content: str | None = "hello", **message: Any) -> dict[str, Any]:
    """Return the payload of a sound completion."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "gpt-4o-mini-2024-07-18",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content, **message},
                "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
            }
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }


def raw(data: bytes, *, close: bool = True) -> Script:
    """Write bytes as they are, and close the connection or leave it hanging."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if close:
            writer.close()
        else:
            await asyncio.Event().wait()

    return script


def events(*payloads: Any, done: bool = True) -> Script:
    """Answer with server-sent events and close."""
    lines = b"".join(b"data: " + orjson.dumps(payload) + b"\n\n" for payload in payloads)
    ending = b"data: [DONE]\n\n" if done else b""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    return raw(head + lines + ending)


def kept_events(*payloads: Any) -> Script:
    """Answer with server-sent events, the end of the body a little later; keep the connection."""
    lines = b"".join(b"data: " + orjson.dumps(payload) + b"\n\n" for payload in payloads)
    lines += b"data: [DONE]\n\n"
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(head + f"{len(lines):x}\r\n".encode() + lines + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)  # a slow network
        writer.write(b"0\r\n\r\n")

    return script


def silence() -> Script:
    """Take the request and never answer."""
    return raw(b"", close=False)


def endless(piece: bytes = b"[" * 65_536) -> Script:
    """Begin a body and never end it."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()

    return script
