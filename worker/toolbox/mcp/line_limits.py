"""Bounds the lines of an MCP server that speaks by standard output: it decides how long they are.

The protocol's client gathers a line until it ends, whatever its length, and copies what it has
with each piece. It has no limit to set, but takes the name of an encoding: this one is UTF-8
without the rest of lines that are too long. What is left of such a line is no message, and the
client says so in the log; the call that waits for it ends by its timeout.
"""

import codecs
from functools import cache

ENCODING = "stepfleet-lines"
MAX_LINE = 4 * 1024 * 1024
"""Bytes of a message."""


class LineDecoder(codecs.IncrementalDecoder):
    """Decodes UTF-8 and leaves out what a line has beyond `MAX_LINE` bytes."""

    def __init__(self, errors: str = "strict") -> None:
        super().__init__(errors)
        self._utf_8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._length = 0

    def decode(self, data: object, final: bool = False) -> str:
        """Return the text of the next bytes."""
        kept = b"\n".join(self._bounded(bytes(data)))  # type: ignore[call-overload]
        return self._utf_8.decode(kept, final)

    def reset(self) -> None:
        """Begin anew."""
        self._utf_8.reset()
        self._length = 0

    def _bounded(self, data: bytes) -> list[bytes]:
        first, *others = data.split(b"\n")
        kept = [first[: max(0, MAX_LINE - self._length)]]
        self._length += len(first)
        for line in others:
            kept.append(line[:MAX_LINE])
            self._length = len(line)
        return kept


@cache
def register_lines() -> None:
    """Make the encoding known to this process."""
    utf_8 = codecs.lookup("utf-8")
    info = codecs.CodecInfo(
        utf_8.encode, utf_8.decode, incrementaldecoder=LineDecoder, name=ENCODING
    )
    names = {ENCODING, ENCODING.replace("-", "_")}
    codecs.register(lambda name: info if name in names else None)
