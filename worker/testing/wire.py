"""What the server needs of a protocol. Rules see every request as a chat completion's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepfleet.worker.testing.openai.answers import failing, refusing, replying
from stepfleet.worker.testing.openai.conversation import Violation
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario.faults import Fault
from stepfleet.worker.testing.scenario.replies import Answer, Reply


class MisfitError(Exception):
    """A request that the protocol does not allow; `violation` says why."""

    def __init__(self, field: str, message: str) -> None:
        self.violation = Violation(field, message)
        super().__init__(str(self.violation))


@dataclass(frozen=True)
class Wire:
    """One protocol: its requests as those of chat completions, and its forms of answers.

    `conversation` takes body and path, and raises `MisfitError`; the others are as in
    `testing.openai.answers`.
    """

    conversation: Callable[[dict[str, Any], str], dict[str, Any]]
    replying: Callable[[RequestRecord, Reply], Answer]
    refusing: Callable[[Violation], Answer]
    failing: Callable[[Fault, Answer], Answer]


CHAT = Wire(lambda body, _: body, replying, refusing, failing)
