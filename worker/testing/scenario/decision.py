"""Decides what a request is answered: refused, failed on purpose, or replied to. Pure."""

from dataclasses import replace

from stepfleet.worker.testing.chat.answers import Answer, failing, refusing, replying
from stepfleet.worker.testing.chat.conversation import Violation, violation_in
from stepfleet.worker.testing.chat.faults import Fault, FaultKind, Faults
from stepfleet.worker.testing.chat.replies import Reply
from stepfleet.worker.testing.chat.requests import RequestRecord
from stepfleet.worker.testing.scenario.scripts import Rules, Said


def decide(request: RequestRecord, rules: Rules, faults: Faults) -> tuple[Answer, Violation | None]:
    """Return the answer, and what was wrong with the request or with the rules."""
    violation = violation_in(dict(request.body), request.key)
    if violation is not None:
        return refusing(violation), violation
    fault = faults.decide(request.key, request.turn, request.attempt)
    try:
        said = rules(request)
    except Exception as error:  # noqa: BLE001 - rules are foreign code; the log shows what they raise
        violation = Violation("rules", f"{type(error).__name__}: {error}")
        return refusing(violation), violation
    return _answer(request, said, fault), None


def _answer(request: RequestRecord, said: Said, fault: Fault | None) -> Answer:
    if isinstance(said, Fault):
        fault, said = fault or said, Reply("")
    reply = Reply(said) if isinstance(said, str) else said
    if fault is None:
        return replying(request, reply)
    if fault.kind is FaultKind.MISSING_USAGE:
        reply = replace(reply, send_usage=False)
    return failing(fault, replying(request, reply))
