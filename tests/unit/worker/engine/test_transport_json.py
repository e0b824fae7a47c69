"""kombu's JSON by orjson: whatever kombu reads and writes in its own way stays kombu's."""

import uuid
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from kombu.utils import json as kombu_json

from stepfleet.worker.engine.transport.fast_json import decode, encode_plain

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
