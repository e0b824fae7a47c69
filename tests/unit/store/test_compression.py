"""Records as they lie in Redis: nothing is lost, old ones stay readable, bombs are refused."""

import base64
import hashlib
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files

import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.store import compression
from stepfleet.orchestrator.store.compression import LARGEST, packed, unpacked

STEP = orjson.dumps(
    {
        "messages": [{"role": "assistant", "content": "done"}],
        "result": {"thought": "done", "step": 1, "started_at": "2026-11-22T13:36:19.649000Z"},
    }
).decode()
STEP_BY_THE_FIRST_RELEASE = "aIIQdAQADgQLnSCZV1ajUb4FeB3wAHqHiYRU1Zxj6+xlSVMnTn3gYBw=="
DIGESTS = {"a": "28b1c41396f69d37aa9638a38ebedda3b96e5acaf4607d3f25cc62e3f62de6a4"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def dictionary(letter: str) -> bytes:
    name = compression.DICTIONARIES[letter]
    return (files(compression.__package__) / "dictionaries" / name).read_bytes()


def stored(frame: bytes, letter: str = "a") -> str:
    """Return a frame as it would be stored."""
    return letter + base64.b64encode(frame[4:]).decode()


def packer(*, told: bool) -> zstandard.ZstdCompressor:
    made = zstandard.ZstdCompressionDict(dictionary("a"))
    return zstandard.ZstdCompressor(dict_data=made, write_dict_id=False, write_content_size=told)


@given(st.dictionaries(st.text(), JSON) | st.lists(JSON))
def test_a_record_comes_back_as_it_was_and_is_never_longer(value: object) -> None:
    record = orjson.dumps(value).decode()
    kept = packed(record)
    assert len(kept) <= len(record)
    assert orjson.loads(unpacked(kept)) == value


def test_a_record_of_a_step_takes_a_fraction() -> None:
    assert len(packed(STEP)) < len(STEP) / 2
    assert unpacked(packed(STEP)) == STEP.encode()


@pytest.mark.parametrize("plain", ["", "{}", '{"a":1}', '[{"role":"user"}]'])
def test_plain_records_are_read_as_they_are(plain: str) -> None:
    """Those of scripts, and of version 1."""
    assert unpacked(plain) == plain.encode()


def test_what_an_earlier_release_has_packed_is_read() -> None:
    assert unpacked(STEP_BY_THE_FIRST_RELEASE) == STEP.encode()


def test_a_dictionary_never_changes() -> None:
    """Whatever was packed against it could not be read any more: a new one gets the next letter."""
    found = {
        letter: hashlib.sha256(dictionary(letter)).hexdigest()
        for letter in compression.DICTIONARIES
    }
    assert found == DIGESTS


def test_a_record_that_is_too_long_stays_plain() -> None:
    long = f'["{"x" * LARGEST}"]'
    assert packed(long) == long
    assert unpacked(long) == long.encode()
    wide = f'["{"ü" * (LARGEST // 2)}"]'  # as many characters as fit, in more bytes
    assert packed(wide) == wide


def bomb(*, told: bool) -> str:
    """Return half a gigabyte of zeros, in a few thousand characters."""
    making = packer(told=told).compressobj(size=2**29 if told else -1)
    parts = [making.compress(bytes(2**24)) for _ in range(2**5)]
    return stored(b"".join([*parts, making.flush()]))


@pytest.mark.parametrize("told", [True, False])
def test_a_bomb_is_refused_before_memory_is_taken_for_it(*, told: bool) -> None:
    hostile = bomb(told=told)
    assert len(hostile) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(SerializationError, match="at most 16777216 are read"):
            unpacked(hostile)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(hostile)
    finally:
        tracemalloc.stop()


def test_a_bomb_that_lies_about_its_size_is_refused() -> None:
    honest = packer(told=True).compress(bytes(2**24 - 1))
    size = (2**24 - 1).to_bytes(4, "little")
    assert size in honest[:12]
    with pytest.raises(SerializationError, match="is damaged"):
        unpacked(stored(honest.replace(size, (300).to_bytes(4, "little"), 1)))


@pytest.mark.parametrize(
    "damaged",
    ["a", "a!", "aAAAA", "a\udc80", packed(STEP)[:-8], packed(STEP)[:40]],
)
def test_a_damaged_record_is_refused_clearly(damaged: str) -> None:
    with pytest.raises(SerializationError, match="a record of the run cannot be read"):
        unpacked(damaged)


@pytest.mark.parametrize("later", ["b" + packed(STEP)[1:], "\x00", "(", "Z"])
def test_a_record_of_a_later_release_is_refused_with_the_fix(later: str) -> None:
    with pytest.raises(SerializationError, match="upgrade this one"):
        unpacked(later)


def test_threads_pack_and_unpack_side_by_side() -> None:
    records = [orjson.dumps({"n": n, "text": f"{n} " * n}).decode() for n in range(400)]

    def there_and_back(record: str) -> bool:
        return unpacked(packed(record)) == record.encode()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(there_and_back, records * 5))
