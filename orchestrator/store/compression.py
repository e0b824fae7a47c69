"""Records as they are stored: compressed against a dictionary of their common text. Pure.

A record is mostly names of fields and the words of criteria, which every other record has as well:
a dictionary holds them once for all, and of each record little remains. Records that scripts read
(the state of an active run, inputs, the journal, the ledger) or write stay plain JSON. Readers
accept both, by the first character: JSON begins with a bracket.

A dictionary never changes, since records lie in Redis that only it can read: a better one becomes
the next letter, and readers keep the ones before it (`benchmarks/dictionary.py` makes one). The
packed form is text, so that a release which does not know it reads the run's version all the same,
and leaves the run to others.
"""

import threading
from binascii import a2b_base64, b2a_base64
from functools import cache, cached_property
from importlib.resources import files

import zstandard
from zstandard import frame_content_size

from stepfleet.orchestrator.errors import SerializationError

LARGEST = 16 * 1024 * 1024
"""Bytes of a record. A longer one is stored as it is; a packed one that claims more is refused."""
LEVEL = 1
DICTIONARIES = {"a": "records-a.zdict"}
"""Their files by the letter that a record begins with."""
NEWEST = "a"
_PLAIN = ("{", "[")
_MAGIC = zstandard.FRAME_HEADER
"""The beginning of every frame; not stored."""


def packed(record: str) -> str:
    """Return a record (JSON) as it is stored: packed where that is shorter. '' stays ''."""
    if not record or len(record) > LARGEST:
        return record
    plain = record.encode()
    if len(plain) > LARGEST:
        return record
    frame = _tools.packer.compress(plain)
    text = NEWEST + b2a_base64(frame[len(_MAGIC) :], newline=False).decode()
    return text if len(text) < len(record) else record


def unpacked(stored: str) -> bytes:
    """Return a stored record as JSON: the argument of `packed`, or plain text as it is.

    A claim does this for every earlier step of its run. Raises `SerializationError` for text
    that no `packed` of this or an earlier release has made, before it takes memory.
    """
    return unpacked_within(LARGEST, stored)


def unpacked_within(largest: int, stored: str) -> bytes:
    """Do as `unpacked`; a packed record of more than `largest` bytes is refused, too."""
    unpacker = _tools.unpackers.get(stored[:1])
    if unpacker is None:
        return _plain(stored)
    try:
        frame = _MAGIC + a2b_base64(stored[1:])
        if 0 <= frame_content_size(frame) <= largest:
            return unpacker.decompress(frame)
    except (ValueError, zstandard.ZstdError) as error:
        msg = f"a record of the run cannot be read: it was packed, and is damaged ({error})"
        raise SerializationError(msg) from None
    msg = (
        f"a record of the run cannot be read: its {len(frame)} bytes claim to hold "
        f"{frame_content_size(frame)}; at most {largest} are read"
    )
    raise SerializationError(msg)


def _plain(stored: str) -> bytes:
    if stored and not stored.startswith(_PLAIN):
        msg = (
            f"a record of the run cannot be read: it begins with {stored[0]!r}, which no release "
            "up to this one writes; upgrade this one"
        )
        raise SerializationError(msg)
    return stored.encode()


class _Tools(threading.local):
    """A packer and the unpackers of one thread; they cannot serve two at once."""

    @cached_property
    def packer(self) -> zstandard.ZstdCompressor:
        return zstandard.ZstdCompressor(
            level=LEVEL,
            dict_data=_dictionary(NEWEST),
            write_checksum=False,
            write_content_size=True,
            write_dict_id=False,
        )

    @cached_property
    def unpackers(self) -> dict[str, zstandard.ZstdDecompressor]:
        return {
            letter: zstandard.ZstdDecompressor(dict_data=_dictionary(letter))
            for letter in DICTIONARIES
        }


@cache
def _dictionary(letter: str) -> zstandard.ZstdCompressionDict:
    """Return a dictionary, prepared once for all packers."""
    stored = files(__package__) / "dictionaries" / DICTIONARIES[letter]
    made = zstandard.ZstdCompressionDict(stored.read_bytes())
    if letter == NEWEST:
        made.precompute_compress(level=LEVEL)
    return made


_tools = _Tools()
