"""Embeddings over real HTTP."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from stepfleet.orchestrator.agents.recall import OpenAIEmbeddings
from stepfleet.orchestrator.errors import AgentMemoryError


class Replies(BaseHTTPRequestHandler):
    """Answers with vectors that count letters, in reverse order; `refuse` is answered with 400."""

    protocol_version = "HTTP/1.1"
    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
        data = [
            {"index": place, "embedding": [len(text), 1]}
            for place, text in enumerate(body["input"])
        ]
        answer = json.dumps(
            {"data": data[::-1]} if body["model"] != "odd" else {"data": 5}
        ).encode()
        self.send_response(400 if body["model"] == "refuse" else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    Replies.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Replies) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/v1", Replies.asked
        http.shutdown()
        thread.join()


async def test_texts_become_vectors_in_their_order(
    server: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MEM-12"""
    url, asked = server
    monkeypatch.setenv("MY_KEY", "secret")
    embed = OpenAIEmbeddings("small", base_url=f"{url}/", api_key_env="MY_KEY")
    assert await embed(["a", "bbb"]) == [[1.0, 1.0], [3.0, 1.0]]
    assert asked == [
        {"path": "/v1/embeddings", "key": "Bearer secret", "model": "small", "input": ["a", "bbb"]}
    ]
    await embed.aclose()


@pytest.mark.parametrize("model", ["refuse", "odd"])
async def test_a_server_that_refuses_is_a_memory_error(
    server: tuple[str, list[dict[str, Any]]], model: str
) -> None:
    """MEM-14"""
    embed = OpenAIEmbeddings(model, base_url=server[0], api_key_env="NO_SUCH_KEY")
    with pytest.raises(AgentMemoryError, match=f"embeddings of '{model}' failed"):
        await embed(["a"])
    await embed.aclose()
