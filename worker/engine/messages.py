"""Whether a task message may be acted on: of the right shape and, with keys, signed. Pure.

Messages may come from strangers; each defect becomes a reason. Must not know where messages come
from, nor what happens to refused ones.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.settings.settings import TOOL_TASK
from stepfleet.orchestrator.settings.signing import HEADER, SigningKeys
from stepfleet.orchestrator.tools.schemas.bounded_json import is_unicode

LONGEST_ID = 200
"""Characters of a run's id."""
HIGHEST = 2**31
"""Steps and calls are numbered below this."""

_STEP = ("run_id", "step")
_CALL = ("run_id", "step", "index")
_OF_OTHERS = ("callbacks", "errbacks", "chain", "chord", "eta", "expires", "group")
_NO_LIMITS = (None, [None, None], (None, None))


class Inadmissible(ValueError):  # noqa: N818 - a verdict
    """The message must not be acted on; the text is the reason."""


def work_in(task: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Work:
    """Return the step, or the tool call, that a task's arguments name. Raises `Inadmissible`."""
    names = _CALL if task == TOOL_TASK else _STEP
    given = args if not kwargs and len(args) == len(names) else _named(names, args, kwargs)
    return Work(_run_id(given[0]), *map(_number, names[1:], given[1:]))


class Headers(Protocol):
    """A message's headers: a mapping, or Celery's context of a task."""

    def get(self, name: str, /) -> Any:
        """Return the header, or None."""


def check_limits(message: Headers) -> None:
    """Raise `Inadmissible` for a hint with time limits: they are the worker's to set.

    A stranger's limit would count against the run as a timeout.
    """
    if message.get("timelimit") not in _NO_LIMITS:
        raise Inadmissible("the message has time limits, which only a worker's options may set")


@dataclass(frozen=True, slots=True)
class SignatureCheck:
    """Lets those messages through that one of `keys` signed, for one of the queues read here.

    What the signature does not cover (time limits, tasks to be called afterwards) must be absent.
    """

    keys: SigningKeys
    queues: Callable[[], Container[str]]

    def check(self, task: str, args: list[Any], message: Headers) -> None:
        """Return if the message with these headers may be acted on. Raises `Inadmissible`."""
        queue = (message.get("delivery_info") or {}).get("routing_key")
        signature = message.get(HEADER)
        if signature is None:
            raise Inadmissible("the message is not signed, and this worker has signing keys")
        if not self.keys.accepts(signature, task, queue, args):
            raise Inadmissible("no key of this worker made the message's signature")
        if queue not in self.queues():
            raise Inadmissible("the message was signed for a queue that this worker does not read")
        if message.get("timelimit") not in _NO_LIMITS or any(map(message.get, _OF_OTHERS)):
            raise Inadmissible("the message was signed without the options that it has now")


def _named(names: tuple[str, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    by_name = [kwargs[name] for name in names[len(args) :] if name in kwargs]
    given = [*args, *by_name]
    if len(given) != len(names) or len(by_name) != len(kwargs):
        raise Inadmissible(f"the message's arguments are not {', '.join(names)}")
    return given


def _run_id(given: Any) -> str:
    if not isinstance(given, str) or not 0 < len(given) <= LONGEST_ID:
        raise Inadmissible(f"run_id must be text of 1 to {LONGEST_ID} characters")
    if not given.isascii() and not is_unicode(given):
        raise Inadmissible("run_id holds a lone surrogate, which is not valid Unicode")
    return given


def _number(name: str, given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < HIGHEST:
        raise Inadmissible(f"{name} must be an integer from 0 below {HIGHEST}")
    return given
