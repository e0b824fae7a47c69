"""AWS's event streams, checked by botocore's own parser of them."""

import struct
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web
from botocore.eventstream import EventStreamBuffer
from hypothesis import given, settings
from hypothesis import strategies as st

from stepfleet.orchestrator import Message, ModelRequest, ModelSettings
from stepfleet.orchestrator.errors import ContextWindowError, ModelError, RateLimitError
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.worker.models import Models
from stepfleet.worker.models.bedrock.converse import (
    MOST_BYTES,
    FrameCutter,
    StreamedConverse,
    parse_converse,
)
from stepfleet.worker.testing.bedrock import FRAMES, frame
from stepfleet.worker.testing.server import listen

unhurried = settings(deadline=None, max_examples=60)


def event(kind: str, **fields: Any) -> bytes:
    return frame(kind, orjson.dumps(fields))


TEXT = event("contentBlockDelta", contentBlockIndex=0, delta={"text": "Hé"})
STOP = event("messageStop", stopReason="end_turn")
USAGE = event("metadata", usage={"inputTokens": 3, "outputTokens": 2, "totalTokens": 5})
WHOLE = event("messageStart", role="assistant") + TEXT + STOP + USAGE


@unhurried
@given(st.lists(st.tuples(st.text(min_size=1, max_size=9), st.binary(max_size=40)), max_size=4))
def test_frames_are_those_that_botocore_reads(given: list[tuple[str, bytes]]) -> None:
    frames = [frame(kind, orjson.dumps({"x": list(data)})) for kind, data in given]
    buffer = EventStreamBuffer()
    buffer.add_data(b"".join(frames))
    theirs = [{one.headers[":event-type"]: orjson.loads(one.payload)} for one in buffer]
    assert [orjson.loads(one) for one in FrameCutter().feed(b"".join(frames))] == theirs


@unhurried
@given(st.integers(1, len(WHOLE)))
def test_a_stream_may_be_cut_anywhere(size: int) -> None:
    cutter, answer = FrameCutter(), StreamedConverse()
    for start in range(0, len(WHOLE), size):
        for data in cutter.feed(WHOLE[start : start + size]):
            answer.add(data)
    assert parse_converse(answer.payload(), "m").content == "Hé"
    assert answer.is_over


@unhurried
@given(st.data())
def test_a_changed_byte_is_found(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(TEXT) - 1))
    changed = bytearray(TEXT)
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ModelError, match="malformed") as raised:
        FrameCutter().feed(bytes(changed) + WHOLE)
    assert raised.value.retryable


@unhurried
@given(st.binary(max_size=200))
def test_bytes_that_are_no_stream_are_malformed_or_wait_for_more(data: bytes) -> None:
    if len(data) < 12:
        assert FrameCutter().feed(data) == []
    else:
        with pytest.raises(ModelError, match="malformed"):
            FrameCutter().feed(data)


def test_a_frame_of_any_length_is_not_waited_for() -> None:
    prelude = struct.pack("!II", MOST_BYTES + 1, 0)
    with pytest.raises(ModelError, match="a frame of"):
        FrameCutter().feed(prelude + struct.pack("!I", zlib.crc32(prelude)))


def test_a_stream_of_many_blocks_is_bounded() -> None:
    answer, cutter = StreamedConverse(), FrameCutter()
    for index in range(2_000):
        start = {"toolUse": {"toolUseId": str(index), "name": "look"}}
        for data in cutter.feed(event("contentBlockStart", contentBlockIndex=index, start=start)):
            answer.add(data)
    answer.add(orjson.dumps({"messageStop": {"stopReason": "tool_use"}}))
    assert len(parse_converse(answer.payload(), "m").tool_calls or ()) == 257


def test_encrypted_reasoning_in_pieces_is_joined() -> None:
    answer = StreamedConverse()
    for piece in ("YQ==", "Yg=="):
        delta = {"reasoningContent": {"redactedContent": piece}}
        answer.add(orjson.dumps({"contentBlockDelta": {"contentBlockIndex": 0, "delta": delta}}))
    answer.add(orjson.dumps({"messageStop": {"stopReason": "end_turn"}}))
    (block,) = parse_converse(answer.payload(), "m").reasoning
    assert block["reasoning"]["data"] == {"reasoningContent": {"redactedContent": "YWI="}}


@asynccontextmanager
async def calling(body: bytes) -> AsyncIterator[Callable[[], Any]]:
    """Yield a call that a server answers with these bytes of a stream."""

    async def serve(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        return web.Response(body=body, headers={"content-type": FRAMES})

    listener = await listen(serve, "127.0.0.1", None)
    url = f"http://127.0.0.1:{listener.port}"
    environment = {"AWS_ENDPOINT_URL_BEDROCK_RUNTIME": url, "AWS_BEARER_TOKEN_BEDROCK": "k"}
    models = Models(environment=environment)
    settings = ModelSettings(stream=True)
    messages = (Message.user("hi"),)
    request = ModelRequest(model="bedrock:m", messages=messages, settings=settings)
    try:
        yield lambda: models.generate(request)
    finally:
        await models.aclose()
        await listener.close()


@pytest.mark.parametrize(
    ("kind", "message", "failure", "code"),
    [
        ("throttlingException", "Too many tokens", RateLimitError, ModelErrorCode.RATE_LIMIT),
        ("validationException", "Input is too long", ContextWindowError, None),
        ("validationException", "no", ModelError, ModelErrorCode.INVALID_REQUEST),
        ("modelStreamErrorException", "no", ModelError, ModelErrorCode.SERVER_ERROR),
        ("serviceUnavailableException", "no", ModelError, ModelErrorCode.SERVER_ERROR),
        ("internalServerException", "no", ModelError, ModelErrorCode.SERVER_ERROR),
        ("modelTimeoutException", "no", ModelError, ModelErrorCode.TIMEOUT),
        ("newException", "no", ModelError, ModelErrorCode.SERVER_ERROR),
    ],
)
async def test_an_exception_in_the_middle_is_the_failure_that_it_names(
    kind: str, message: str, failure: type[ModelError], code: ModelErrorCode | None
) -> None:
    exception = frame(kind, orjson.dumps({"message": message}), "exception")
    async with calling(TEXT + exception + STOP + USAGE) as call:
        with pytest.raises(failure, match=message) as raised:
            await call()
    assert code is None or raised.value.code == code
    assert raised.value.received is not None


@pytest.mark.parametrize(
    "body", [b"", TEXT, TEXT + STOP[:-1], TEXT + STOP[:-4] + b"0000", frame("messageStop", b"{")]
)
async def test_a_stream_that_breaks_off_is_tried_again(body: bytes) -> None:
    async with calling(body) as call:
        with pytest.raises(ModelError, match="malformed") as raised:
            await call()
    assert raised.value.retryable


async def test_a_stream_without_counts_is_an_answer() -> None:
    async with calling(TEXT + STOP) as call:
        answer = await call()
    assert (answer.content, answer.usage) == ("Hé", None)
