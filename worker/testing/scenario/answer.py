"""One HTTP answer as a value: its bytes, and how the connection ends after them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus

from stepfleet.worker.testing.scenario.replies import Usage

JSON = "application/json"
EVENTS = "text/event-stream"
REPLIED = "replied"
REFUSED = "refused"


class Ending(StrEnum):
    """The end of the connection after the last byte."""

    COMPLETE = "complete"
    CLOSE = "close"
    """The connection closes although more was announced."""
    RESET = "reset"
    """The connection is reset: before any byte where there are none."""
    SILENCE = "silence"
    """Nothing, until the client goes away."""


@dataclass(frozen=True)
class Answer:
    """One answer: a body in pieces. `length` (bytes) is announced; None means chunked.

    `delay` and `pause` are the seconds before the first piece and between the pieces; a delay of
    None leaves it to the server.
    """

    outcome: str
    status: int = HTTPStatus.OK
    pieces: tuple[bytes, ...] = ()
    content_type: str = JSON
    length: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    ending: Ending = Ending.COMPLETE
    delay: float | None = None
    pause: float = 0.0
    usage: Usage | None = None
