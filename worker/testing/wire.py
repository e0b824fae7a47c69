"""What the server needs of a protocol. Rules see every request as a chat completion's."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stepfleet.worker.testing.openai.answers import (
    failing,
    limit_headers,
    prompt_of,
    refusing,
    replying,
    too_long,
)
from stepfleet.worker.testing.openai.conversation import SHAPE, Violation
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.rate_limits import RateStanding
from stepfleet.worker.testing.scenario import Fault, HttpAnswer, Prompt, Reply, misfit

PLAIN_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class MisfitError(Exception):
    """A request that the protocol does not allow; `violation` says why."""

    def __init__(self, field: str, message: str) -> None:
        self.violation = Violation(field, message)
        super().__init__(str(self.violation))


def fit(
    body: dict[str, Any], shape: dict[str, Any], *, index: str = "[{}]", unknown: str | None = None
) -> None:
    """Raise `MisfitError` where a value of the body has not the shape.

    `unknown` is why a field is refused that the shape does not have; None takes any.
    """
    known = {name.removesuffix("?") for name in shape}
    if unknown is not None and (others := sorted(body.keys() - known)):
        raise MisfitError(others[0], unknown)
    if found := misfit(body, shape, index=index):
        raise MisfitError(*found)


def fit_id(call_id: str, form: re.Pattern[str], place: str) -> None:
    """Raise `MisfitError` for an id of a call that the service does not take."""
    if not form.fullmatch(call_id):
        raise MisfitError(place, f"String should match pattern '^{form.pattern}$'")


@dataclass(frozen=True)
class Wire:
    """One protocol: its requests as those of chat completions, and its forms of answers.

    `conversation` takes body and path, and raises `MisfitError`; a reply has its usage. `prompt` is
    what the service caches of a request, `too_long` words the refusal of a prompt. `limit_headers`
    has the headers of rate limits, with the seconds to wait in a 429; `free_reads` says whether
    tokens that were read from the cache count against no limit. `id_header` names the request;
    "" where the answer itself does.
    """

    conversation: Callable[[dict[str, Any], str], dict[str, Any]]
    replying: Callable[[RequestRecord, Reply], HttpAnswer]
    refusing: Callable[[Violation], HttpAnswer]
    failing: Callable[[Fault, HttpAnswer], HttpAnswer]
    prompt: Callable[[RequestRecord], Prompt] = prompt_of
    too_long: Callable[[int, int], str] = too_long
    limit_headers: Callable[[Mapping[str, RateStanding], float | None], Mapping[str, str]] = (
        limit_headers
    )
    free_reads: bool = False
    id_header: str = "x-request-id"


def _chat(body: dict[str, Any], _path: str) -> dict[str, Any]:
    fit(body, SHAPE)
    return body


CHAT = Wire(_chat, replying, refusing, failing)
