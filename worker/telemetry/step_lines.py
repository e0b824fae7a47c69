"""Logs each commit in a line: steps, retries, hand-backs, ends.

Observes steps only where somebody reads the lines.
"""

import logging
from collections.abc import Iterator

from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.claim import Claim, Committed, Refusal
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.records.run.report import described
from stepfleet.orchestrator.records.run.trace_steps import one_line
from stepfleet.orchestrator.records.text.redaction import redact
from stepfleet.worker.ports import StepObserver
from stepfleet.worker.telemetry.logs import enter_step

log = logging.getLogger("stepfleet.steps")


def step_logger(*, as_json: bool) -> tuple[StepObserver, ...]:
    """Return what logs commits, or nothing where nobody reads the lines.

    Lines of JSON are of level INFO, so that a filter by run shows the whole run; text is DEBUG.
    """
    level = logging.INFO if as_json else logging.DEBUG
    return (StepLogger(level),) if log.isEnabledFor(level) else ()


class StepLogger(StepObserver):
    """Logs each commit that is applied with `level`."""

    def __init__(self, level: int) -> None:
        self._level = level

    def claimed(self, claim: Claim | Refusal) -> None:
        """Note whose step it is, for all lines that are logged in it."""
        if isinstance(claim, Claim):
            enter_step(claim)

    def committed(
        self, claim: Claim, verdict: Verdict, events: Events, committed: Committed
    ) -> None:
        """Log what was committed."""
        del events
        if not committed.applied:
            return
        try:
            for line in lines_of(claim, verdict):
                text = redact(line)
                log.log(self._level, "%s %s %s", claim.config.name, claim.run_id, text)
        except Exception:
            # What is committed stays so, whatever the log gets of it.
            log.exception("a step of run %s could not be logged", claim.run_id)


def lines_of(claim: Claim, verdict: Verdict) -> Iterator[str]:
    """Yield the lines of a commit: the step, and what becomes of the run."""
    if verdict.logged:
        yield described(verdict.logged.result)
    match verdict.move:
        case Move.RETRY:
            why = f": {one_line(verdict.failure.message)}" if verdict.failure else ""
            attempt = claim.attempts + claim.limited + 2
            yield f"step {claim.number}: attempt {attempt} in {verdict.delay:.1f} s{why}"
        case Move.RELEASE:
            yield f"step {claim.number}: handed back"
        case Move.WAIT:
            yield f"step {claim.number}: waits for its tool calls"
        case Move.FINISH:
            why = f": {one_line(verdict.error)}" if verdict.error else ""
            yield f"ended after {verdict.state.session_steps} steps: {verdict.stop_reason}{why}"
        case Move.CONTINUE:
            pass
