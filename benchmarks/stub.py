"""A model server that costs next to nothing: what a benchmark should not measure.

python benchmarks/stub.py [--port N] [--latency S] [--log FILE] [--parent-pid P]

Says what `rules.py` says: the first message is `N turns, ...`; a call of the tool `look` on every
turn but the last, then `done`. One process, one event loop, HTTP/1.1 with kept connections. Prints
`{"url": ...}` when it listens. `--log` gets a line of JSON per call: run, turn, and the monotonic
times (seconds, one clock for all processes of a machine) of its arrival and of its answer, which is
null where the caller was gone.
"""

import argparse
import asyncio
import json
import os
import signal
import time
from typing import Any, cast

import orjson

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
_PARENT_SECONDS = 0.5


def answer(body: dict[str, Any]) -> tuple[str, int, bytes]:
    """Return the question, the turn (from 0) and the bytes of the answer to a chat request."""
    messages = body["messages"]
    question = next(m["content"] for m in messages if m["role"] == "user")
    turn = sum(m["role"] == "assistant" for m in messages)
    message: dict[str, Any] = {"role": "assistant", "content": "done"}
    finish = "stop"
    if turn + 1 < int(question.split(" ", 1)[0]):
        call = {"name": "look", "arguments": f'{{"step":{turn + 1}}}'}
        calls = [{"id": f"call_{turn}", "type": "function", "function": call}]
        message, finish = {"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls"
    choice = {"index": 0, "message": message, "finish_reason": finish}
    reply = {"id": "c", "object": "chat.completion", "created": 0, "model": body.get("model", "")}
    return question, turn, orjson.dumps({**reply, "choices": [choice], "usage": _USAGE})


class Conversation(asyncio.Protocol):
    """One connection; requests on it follow one another."""

    def __init__(self, latency: float, log: "list[bytes] | None") -> None:
        self._latency = latency
        self._log = log
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer every request that is whole."""
        self._buffer += data
        while (head := self._buffer.find(b"\r\n\r\n")) >= 0:
            length = _length(self._buffer[:head])
            end = head + 4 + length
            if len(self._buffer) < end:
                return
            body, self._buffer = self._buffer[head + 4 : end], self._buffer[end:]
            arrived = time.monotonic()
            question, turn, reply = answer(orjson.loads(body))
            if self._latency:
                loop = asyncio.get_running_loop()
                loop.call_later(self._latency, self._answer, question, turn, arrived, reply)
            else:
                self._answer(question, turn, arrived, reply)

    def _answer(self, question: str, turn: int, arrived: float, reply: bytes) -> None:
        gone = self._transport is None or self._transport.is_closing()
        if self._log is not None:
            answered = None if gone else time.monotonic()
            line = {"run": question, "turn": turn, "arrived": arrived, "answered": answered}
            self._log.append(orjson.dumps(line))
        if self._transport is not None and not gone:
            self._transport.write(_HEAD % len(reply) + reply)


def _length(head: bytes) -> int:
    at = head.lower().find(b"content-length:")
    return int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


async def serve(port: int, latency: float, log_file: str | None, parent: int | None) -> None:
    """Listen on loopback until a signal, or until `parent` is gone."""
    log: list[bytes] | None = [] if log_file else None
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    server = await loop.create_server(
        lambda: Conversation(latency, log), "127.0.0.1", port, backlog=4096
    )
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    print(json.dumps({"url": address}), flush=True)
    while not ended.is_set() and (parent is None or os.getppid() == parent):
        try:
            await asyncio.wait_for(ended.wait(), _PARENT_SECONDS)
        except TimeoutError:
            continue
    server.close()
    if log_file:
        with open(log_file, "wb") as file:  # noqa: PTH123, ASYNC230 - at the end, a name as given
            file.write(b"\n".join(log or []))


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--log")
    parser.add_argument("--parent-pid", type=int)
    args = parser.parse_args()
    try:
        import uvloop  # noqa: PLC0415 - where it is

        run: Any = uvloop.run
    except ImportError:
        run = asyncio.run
    run(serve(args.port, args.latency, args.log, args.parent_pid))


if __name__ == "__main__":
    main()
