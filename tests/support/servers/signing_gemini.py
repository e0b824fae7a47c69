"""A service of `generateContent` that refuses calls which come back without their signature.

It takes fields in either spelling, as Google's does and proxies send them.
"""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

SIGNATURE = "c2lnbmVk" * 500
"""Longer than an id of a call may be."""
_CALLS = [
    {"functionCall": {"name": "look", "args": {"at": 1}}, "thoughtSignature": SIGNATURE},
    {"functionCall": {"name": "look", "args": {"at": 2}}},
]


@contextlib.contextmanager
def signing_gemini() -> Iterator[str]:
    """Serve until the block ends; return the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1beta"
    finally:
        server.shutdown()
        server.server_close()


class _Service(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        body = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
        status, answer = _answer([part for turn in body["contents"] for part in turn["parts"]])
        data, kind = orjson.dumps(answer), "application/json"
        if "stream" in self.path and status == 200:
            data, kind = b"data: " + data + b"\n\n", "text/event-stream"
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _answer(parts: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    called = [part for part in parts if "functionCall" in part or "function_call" in part]
    if called and called[0].get("thoughtSignature") != SIGNATURE:
        message = "Function call is missing a thought_signature in functionCall parts."
        return 400, {"error": {"code": 400, "message": message, "status": "INVALID_ARGUMENT"}}
    content = {"role": "model", "parts": [{"text": "Seen."}] if called else _CALLS}
    usage = {"promptTokenCount": 5, "candidatesTokenCount": 5, "totalTokenCount": 10}
    candidate = {"content": content, "finishReason": "STOP", "index": 0}
    return 200, {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "gemini"}
