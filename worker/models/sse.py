"""Cuts a byte stream into server-sent events, as most providers stream their answers. Pure."""

from collections.abc import Iterator

_FIELDS = (b":", b"event:", b"id:", b"retry:")


class EventLines:
    """Cuts a byte stream into the data of its server-sent events."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes and return the data of every event that they complete."""
        head, newline, rest = chunk.rpartition(b"\n")
        if not newline:
            self._begun.append(chunk)
            return []
        lines = b"".join([*self._begun, head]).split(b"\n")
        self._begun = [rest]
        return [data for line in lines for data in self._line(line.rstrip(b"\r"))]

    def end(self) -> list[bytes]:
        """Return the data of an event that the stream's end completes."""
        return self.feed(b"\n\n")

    def _line(self, line: bytes) -> Iterator[bytes]:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            yield b"\n".join(self._data)
            self._data.clear()
        elif line and self._data and self._is_cut() and not line.startswith(_FIELDS):
            # A line break that the server did not escape: the text goes on.
            self._data.append(line)

    def _is_cut(self) -> bool:
        last = self._data[-1].rstrip()
        return self._data[0].startswith(b"{") and not last.endswith(b"}")
