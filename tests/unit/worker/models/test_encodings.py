"""Bodies are read by what their bytes are, whatever the server's label says, and within bounds."""

import gzip
import zlib
from collections.abc import Iterator

import orjson
import pytest
from support.servers.answer_desk import AnswerDesk, answer_desk
from support.servers.raw_model_server import completion_body, raw, reply

from stepfleet.orchestrator import LLMResponse, ModelErrorCode
from stepfleet.orchestrator.errors import ModelError
from stepfleet.worker.models.http_model import RESPONSE_LIMIT

MODEL = "openai:m"
BODY = orjson.dumps(completion_body("hello"))
LINES = (
    b'data: {"choices": [{"delta": {"content": "hello"}, "finish_reason": "stop"}]}\n\n'
    b"data: [DONE]\n\n"
)
ZIPPED = gzip.compress(BODY)


@pytest.fixture(scope="module")
def desk() -> Iterator[AnswerDesk]:
    with answer_desk() as desk:
        yield desk


def raw_deflate(data: bytes) -> bytes:
    packing = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packing.compress(data) + packing.flush()


READ: dict[str, tuple[str, bytes]] = {
    "gzip": ("gzip", ZIPPED),
    "its old name": ("x-gzip", ZIPPED),
    "in capitals": ("GZIP", ZIPPED),
    "and nothing more": ("gzip, identity", ZIPPED),
    "without a label": ("", ZIPPED),
    "under the wrong one": ("br", ZIPPED),
    "in two members": ("gzip", gzip.compress(BODY[:50]) + gzip.compress(BODY[50:])),
    "with padding": ("gzip", ZIPPED + b"\0" * 9),
    "a label alone": ("gzip", BODY),
    "another one": ("br", BODY),
    "a character set": ("utf-8", BODY),
    "zlib": ("deflate", zlib.compress(BODY)),
    "deflate": ("deflate", raw_deflate(BODY)),
    "a stream": ("gzip", gzip.compress(LINES)),
}


@pytest.mark.parametrize("case", READ)
def test_a_body_is_read_by_its_bytes(case: str, desk: AnswerDesk) -> None:
    label, body = READ[case]
    answer = desk.ask(MODEL, reply(200, body, {"Content-Encoding": label}), stream=False)
    assert isinstance(answer, LLMResponse), answer
    assert answer.content == "hello"


@pytest.mark.parametrize("body", [b"\x0b\x02\x80\xff\x7d\x03", b"\x28\xb5\x2f\xfd\x04\x00"])
@pytest.mark.parametrize("label", ["br", "zstd"])
def test_an_encoding_that_is_not_read_is_named(label: str, body: bytes, desk: AnswerDesk) -> None:
    failure = desk.ask(MODEL, reply(200, body, {"Content-Encoding": label}), stream=False)
    assert isinstance(failure, ModelError)
    assert f"its body is encoded as '{label}', which was not asked for" in failure.message
    assert failure.code == ModelErrorCode.MALFORMED_ANSWER


REFUSED = orjson.dumps({"error": {"message": "Incorrect key", "code": "invalid_api_key"}})


@pytest.mark.parametrize(
    ("label", "body", "words"),
    [
        ("gzip", gzip.compress(REFUSED), "Incorrect key"),
        ("gzip", REFUSED, "Incorrect key"),
        ("gzip", ZIPPED[:20] + b"\xff" * 20, "status 401"),
        ("br", b"\x0b\x02\x80\xff\x7d\x03", "status 401"),
    ],
    ids=["gzip", "a label alone", "broken", "unreadable"],
)
def test_a_refusal_has_its_code_however_its_body_is_encoded(
    label: str, body: bytes, words: str, desk: AnswerDesk
) -> None:
    failure = desk.ask(MODEL, reply(401, body, {"Content-Encoding": label}), stream=False)
    assert isinstance(failure, ModelError)
    assert failure.code == ModelErrorCode.INVALID_API_KEY
    assert words in failure.message


def test_the_status_of_a_body_that_breaks_off_counts(desk: AnswerDesk) -> None:
    head = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 999\r\n\r\n"
    failure = desk.ask(MODEL, raw(head + b"Unauth"), stream=False)
    assert isinstance(failure, ModelError)
    assert failure.code == ModelErrorCode.INVALID_API_KEY


@pytest.mark.parametrize("label", ["gzip", ""])
def test_a_body_that_grows_beyond_the_limit_is_given_up(label: str, desk: AnswerDesk) -> None:
    body = gzip.compress(b"{" + b" " * (2 * RESPONSE_LIMIT), 1)
    failure = desk.ask(MODEL, reply(200, body, {"Content-Encoding": label}), stream=False)
    assert isinstance(failure, ModelError)
    assert "longer than the limit" in failure.message


def test_compressed_bytes_that_break_are_a_malformed_answer(desk: AnswerDesk) -> None:
    body = ZIPPED[:20] + b"\xff" * 20
    failure = desk.ask(MODEL, reply(200, body, {"Content-Encoding": "gzip"}), stream=False)
    assert isinstance(failure, ModelError)
    assert failure.code == ModelErrorCode.MALFORMED_ANSWER
    assert failure.retryable


@pytest.mark.parametrize(
    "headers", [{"x-policy": "a" * 10_000}, {f"x-{i}": "1" for i in range(200)}]
)
def test_a_long_head_costs_no_answer(headers: dict[str, str], desk: AnswerDesk) -> None:
    answer = desk.ask(MODEL, reply(200, BODY, headers), stream=False)
    assert isinstance(answer, LLMResponse), answer


@pytest.mark.parametrize("head", [b"x-policy: " + b"a" * 100_000, b"no header"])
def test_a_head_that_is_not_read_is_no_400_of_the_server(head: bytes, desk: AnswerDesk) -> None:
    script = raw(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n{}")
    failure = desk.ask(MODEL, script, stream=False)
    assert isinstance(failure, ModelError)
    assert failure.code == ModelErrorCode.CONNECTION_ERROR
    assert "the head of its answer cannot be read" in failure.message
    assert "400" not in failure.message
