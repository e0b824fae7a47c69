"""Chooses the answer to a request: by rules, by scripts written beforehand, or a fault. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.references import load_file, load_module
from stepfleet.worker.testing.openai.conversation import Violation, violation_in
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, FaultKind, Faults, Reply

Said = Reply | Fault | str
Rules = Callable[[RequestRecord], Said]


class NoReplyError(LookupError):
    """There is no reply for this request: add one to the script, or give the server rules."""


class RulesNotFoundError(Exception):
    """The rules cannot be loaded; the message names the reference and the fix."""


class Scripts:
    """Replies per conversation key, one per turn; other conversations follow the rules.

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
            raise NoReplyError(f"{msg}; turn {request.turn} was requested")
        return script[request.turn - 1]


def as_rules(given: Rules | Mapping[str, Sequence[Said]] | None) -> Scripts:
    """Return rules that can be added to: of a callable, of scripts by key, or of nothing."""
    if isinstance(given, Mapping):
        return Scripts(given)
    return Scripts({}, given)


def load_rules(reference: str) -> Rules:
    """Return the rules that `reference` names. Raises `RulesNotFoundError`.

    A file is imported by its path, with its folder importable, as for a script.
    """
    place, colon, attribute = reference.rpartition(":")
    if not colon or not place or not attribute:
        raise RulesNotFoundError(
            f"{reference!r} names no rules; write module:attribute or file.py:attribute"
        )
    try:
        load = load_file if place.endswith(".py") else load_module
        rules = getattr(load(place, "rules"), attribute, None)
    except ConfigurationError as error:
        raise RulesNotFoundError(error.message) from error
    if not callable(rules):
        raise RulesNotFoundError(
            f"{place} has no callable {attribute!r}; define a function from a request to a reply"
        )
    return cast("Rules", rules)


@dataclass(frozen=True)
class Choice:
    """What a request gets: a reply, spoiled by a fault if there is one, or a refusal."""

    reply: Reply = field(default_factory=lambda: Reply(""))
    fault: Fault | None = None
    violation: Violation | None = None


def choose(request: RequestRecord, rules: Rules, faults: Faults) -> Choice:
    """Return the reply and fault for a request, or what was wrong with it or with the rules."""
    violation = violation_in(dict(request.body), request.key)
    if violation is not None:
        return Choice(violation=violation)
    fault = faults.decide(request.key, request.turn, request.attempt)
    try:
        said = rules(request)
    except Exception as error:  # noqa: BLE001 - rules are foreign code; the log shows what they raise
        return Choice(violation=Violation("rules", f"{type(error).__name__}: {error}"))
    if isinstance(said, Fault):
        fault, said = fault or said, Reply("")
    reply = Reply(said) if isinstance(said, str) else said
    if fault is not None and fault.kind is FaultKind.MISSING_USAGE:
        reply = replace(reply, send_usage=False)
    if fault is not None and fault.kind is FaultKind.REFUSAL:
        why = fault.message or "I cannot help with that."
        reply = replace(reply, content=None, tool_calls=(), refusal=why)
    return Choice(reply, fault)
