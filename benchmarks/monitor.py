"""Watches every command that a Redis does, in the order of doing, with its time: MONITOR.

Costs Redis a few microseconds per command: for counting and for low loads, never for throughput.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import redis

END = "end-of-watching"
_LINE = re.compile(rb"(\d+\.\d+) \[\d+ (\S+)\] (.*)", re.DOTALL)
_WORD = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_HINT = re.compile(rb"\['([0-9a-zA-Z:_-]+)', (\d+)\]")
_LONGEST_HEAD = 12


@dataclass(frozen=True)
class Seen:
    """One command: epoch seconds, the client's address or `lua`, its name, and its raw text."""

    at: float
    by: str
    name: str
    text: bytes

    @property
    def inside(self) -> bool:
        """Whether a script called it."""
        return self.by == "lua"

    @property
    def words(self) -> list[str]:
        """The first words of the command, its name among them."""
        found = (match.group(1) for match in _WORD.finditer(self.text))
        return [word.decode(errors="replace") for word, _ in zip(found, range(_LONGEST_HEAD))]  # noqa: B905 - the shorter ends it

    @property
    def arguments(self) -> tuple[bytes, ...]:
        """The whole command as it was sent."""
        found = (match.group(1) for match in _WORD.finditer(self.text))
        return tuple(word.decode("unicode_escape").encode("latin-1") for word in found)

    @property
    def hint(self) -> tuple[str, int] | None:
        """The run and the step of a task message that is pushed; None for other commands."""
        if self.name not in {"lpush", "rpush"}:
            return None
        match = _HINT.search(self.text)
        return (match.group(1).decode(), int(match.group(2))) if match else None


class Watch:
    """The commands seen; complete when the `watching` block has ended."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    @property
    def seen(self) -> Iterator[Seen]:
        """The commands in their order."""
        for line in self.lines:
            match = _LINE.match(line)
            if match:
                text = match.group(3)
                name = _WORD.match(text)
                command = name.group(1).decode().lower() if name else ""
                yield Seen(float(match.group(1)), match.group(2).decode(), command, text)


@contextmanager
def watching(url: str) -> Iterator[Watch]:
    """Watch the server while the block runs."""
    watch = Watch()
    with redis.Redis.from_url(url, socket_timeout=None) as client, client.monitor() as monitor:
        thread = threading.Thread(target=_read, args=(monitor, watch), daemon=True)
        thread.start()
        try:
            yield watch
        finally:
            with redis.Redis.from_url(url) as other:
                other.echo(END)
            thread.join(timeout=60)


def _read(monitor: "redis.client.Monitor", watch: Watch) -> None:
    end = END.encode()
    while True:
        line = monitor.connection.read_response(disable_decoding=True)
        if end in line:
            return
        watch.lines.append(line)
