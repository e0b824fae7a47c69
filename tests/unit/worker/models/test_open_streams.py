"""Streams whose answer is finished, by its own reason, while the stream itself does not end."""

from typing import Any

import orjson
import pytest
from support.servers.raw_model_server import RawModelServer, raw

from stepfleet.orchestrator import Message, ModelRequest, ModelSettings
from stepfleet.worker.models.connections import Connections
from stepfleet.worker.models.providers import service_model
from stepfleet.worker.testing.bedrock import FRAMES, frame

GRACE = 0.05


def lines(*payloads: Any) -> bytes:
    return b"".join(b"data: " + orjson.dumps(payload) + b"\n\n" for payload in payloads)


def frames(**events: Any) -> bytes:
    return b"".join(frame(name, orjson.dumps(body)) for name, body in events.items())


CHAT = lines({"choices": [{"delta": {"content": "Hello"}, "finish_reason": "stop"}]})
FINISHED: dict[str, tuple[str, bytes]] = {
    "chat": ("openai", CHAT),
    "chat, with signs of life": ("openai", CHAT + b": ping\n\n" * 3),
    "chat, half of its usage": ("openai", CHAT + b'data: {"usage": {"prompt_tok'),
    "claude": ("anthropic", lines(
        {"type": "message_start", "message": {"role": "assistant"}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0,
         "delta": {"type": "text_delta", "text": "Hello"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    )),
    "gemini": ("google", lines(
        {"candidates": [{"content": {"parts": [{"text": "Hello"}]}, "finishReason": "STOP"}]},
    )),
    "converse": ("bedrock", frames(
        messageStart={"role": "assistant"},
        contentBlockDelta={"contentBlockIndex": 0, "delta": {"text": "Hello"}},
        contentBlockStop={"contentBlockIndex": 0},
        messageStop={"stopReason": "end_turn"},
    )),
}  # fmt: skip


@pytest.mark.parametrize("breaks", [False, True], ids=["stays open", "breaks"])
@pytest.mark.parametrize("case", FINISHED)
async def test_a_finished_answer_is_used_however_its_stream_goes_on(
    case: str, breaks: bool
) -> None:
    """STRM-07: it is paid for, and whole; another attempt would be paid again."""
    service, body = FINISHED[case]
    kind = FRAMES if service == "bedrock" else "text/event-stream"
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: 99999\r\n\r\n"
    connections, environment = Connections(), {"AWS_BEARER_TOKEN_BEDROCK": "k", "KEY": "k"}
    model = service_model(service, connections, environment=environment, grace=GRACE)
    async with RawModelServer().running() as server:
        server.answers(raw(head.encode() + body, close=breaks))
        settings = ModelSettings(
            base_url=server.base_url, api_key_env="KEY", stream=True, timeout=20
        )
        request = ModelRequest(model="m", messages=(Message.user("hi"),), settings=settings)
        answer = await model.generate(request)
        assert len(server.received) == 1
    await connections.aclose()
    assert (answer.content, answer.finish_reason) == ("Hello", "stop")
