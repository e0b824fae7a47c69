"""Chooses replies from lists written beforehand. Pure: the turn asked for picks the reply."""

from collections.abc import Callable, Mapping, Sequence

from stepfleet.worker.testing.chat.faults import Fault
from stepfleet.worker.testing.chat.replies import Reply
from stepfleet.worker.testing.chat.requests import RequestRecord

Said = Reply | Fault | str
Rules = Callable[[RequestRecord], Said]


class NoReplyError(LookupError):
    """There is no reply for this request: add one to the script, or give the server rules."""


class Scripts:
    """Replies per conversation key, one per turn; what is not scripted goes to the rules.

    A text is short for a reply with that text; a fault fails every attempt of its turn.
    """

    def __init__(self, scripts: Mapping[str, Sequence[Said]], rules: Rules | None = None) -> None:
        self._scripts = {key: tuple(replies) for key, replies in scripts.items()}
        self._rules = rules

    def with_script(self, key: str, replies: Sequence[Said]) -> "Scripts":
        """Return a copy in which the conversation `key` gets these replies."""
        return Scripts({**self._scripts, key: replies}, self._rules)

    def __call__(self, request: RequestRecord) -> Said:
        """Return the reply. Raises `NoReplyError` where nothing fits."""
        script = self._scripts.get(request.key)
        if script is None:
            if self._rules is None:
                raise NoReplyError(f"no script for the conversation {request.key[:80]!r}")
            return self._rules(request)
        if request.turn > len(script):
            msg = f"the script of {request.key[:80]!r} ends after turn {len(script)}"
            raise NoReplyError(f"{msg}; turn {request.turn} was asked for")
        return script[request.turn - 1]


def as_rules(given: Rules | Mapping[str, Sequence[Said]] | None) -> Scripts:
    """Return rules that can be added to: of a callable, of scripts by key, or of nothing."""
    if isinstance(given, Mapping):
        return Scripts(given)
    return Scripts({}, given)
