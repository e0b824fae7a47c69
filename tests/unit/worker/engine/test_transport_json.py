"""kombu's JSON by orjson: whatever kombu reads and writes in its own way stays kombu's."""

import base64
import json
import uuid
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from kombu.exceptions import ContentDisallowed
from kombu.utils import json as kombu_json

from stepfleet.worker.engine.transport.channel import ExaminedMessage
from stepfleet.worker.engine.transport.fast_json import decode, encode_plain
from stepfleet.worker.engine.transport.guard import DECODED, examine, examine_broadcast

kombus: Any = kombu_json  # not typed
PLAIN: dict[str, Any] = {"id": "1", "args": [["run", 0], {}, None], "text": "Zoë \u2028", "at": 1.5}
OWN_WAY = {
    "moment": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    "id": uuid.UUID(int=7),
    "price": Decimal("1.10"),
    "raw": b"bytes",
}


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: data.decode()])
def test_plain_data_is_read_from_whatever_holds_it(wrap: Any) -> None:
    assert decode(wrap(kombus.dumps(PLAIN).encode())) == PLAIN


@pytest.mark.parametrize(
    "text",
    [
        kombus.dumps(OWN_WAY),
        '{"big": 123456789012345678901234567890}',
        '{"inf": Infinity}',
        '"\\ud800"',
    ],
)
def test_what_orjson_cannot_read_is_read_as_kombu_does(text: str) -> None:
    assert decode(text.encode()) == kombus.loads(text)


def test_what_is_no_json_is_refused_as_kombu_does() -> None:
    with pytest.raises(ValueError, match="Expecting"):
        decode(b"{")


def test_plain_data_is_written_so_that_kombu_reads_it() -> None:
    assert kombus.loads(encode_plain(PLAIN)) == PLAIN


@pytest.mark.parametrize("name", ["moment", "price", "raw"])
def test_typed_values_are_written_kombus_way(name: str) -> None:
    value = {name: OWN_WAY[name]}
    assert encode_plain(value) == kombus.dumps(value)


class Plain:
    """The part of a channel that a message needs."""

    def decode_body(self, body: str, encoding: Any) -> str:
        assert encoding is None
        return body

    def encode_body(self, body: bytes, encoding: str) -> tuple[str, str]:
        assert encoding == "base64"
        return base64.b64encode(body).decode(), encoding


def raw_message(body: str, **fields: Any) -> bytes:
    message = {
        "body": body,
        "content-type": "application/json",
        "headers": {"task": "t", "id": "1"},
        "properties": {},
        **fields,
    }
    return json.dumps(message).encode()


def test_an_examined_message_has_its_own_body_whatever_a_stranger_claims_it_to_be() -> None:
    made = raw_message('[["a", 1], {}, {}]', decoded=[["b", 2], {}, {}])
    assert examine(made)[DECODED] == [["a", 1], {}, {}]


def test_a_body_whose_numbers_only_kombu_reads_is_left_to_kombu() -> None:
    made = raw_message(f"[[{10**20}], {{}}, {{}}]", decoded=[[1], {}, {}])
    assert examine(made)[DECODED] is None


def test_content_that_a_consumer_does_not_accept_is_refused_though_it_was_examined() -> None:
    raw = raw_message("[[1], {}, {}]", properties={"delivery_tag": "x"})
    taken, refused = (ExaminedMessage(examine(raw), Plain()) for _ in range(2))
    taken.accept, refused.accept = {"application/json"}, {"application/x-yaml"}
    assert taken.payload == [[1], {}, {}]
    with pytest.raises(ContentDisallowed):
        refused.decode()


def test_a_message_goes_back_to_its_queue_as_it_came() -> None:
    """Kombu does this where it keeps no copy of what is not acknowledged."""
    raw = raw_message("[[1], {}, {}]", properties={"delivery_tag": "x"})
    again = ExaminedMessage(examine(raw), Plain()).serializable()
    assert examine(json.dumps(again).encode())[DECODED] == [[1], {}, {}]


def test_a_broadcast_brings_no_decoded_body_of_its_senders() -> None:
    message = json.loads(raw_message('{"method": "ping"}', decoded={"method": "shutdown"}))
    examine_broadcast(message)
    taken = ExaminedMessage({**message, "properties": {"delivery_tag": "x"}}, Plain())
    taken.accept = {"application/json"}
    assert taken.payload == {"method": "ping"}
