"""Logs each commit in a line: steps, retries, hand-backs, ends.

Wraps the store of steps only where the lines are read.
"""

import logging
from collections.abc import Iterator

from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.claim import Claim, Committed, Refusal, StepHint
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.records.run.step_lines import described
from stepfleet.orchestrator.records.run.trace_steps import one_line
from stepfleet.orchestrator.records.text.redaction import redact
from stepfleet.worker.ports import Store
from stepfleet.worker.telemetry.identity import enter_step

log = logging.getLogger("stepfleet.steps")


def logged(store: Store, *, as_json: bool) -> Store:
    """Return the store with its commits logged, or the store itself where the level is disabled.

    Lines of JSON are of level INFO, so that a filter by run shows the whole run; text is DEBUG.
    """
    level = logging.INFO if as_json else logging.DEBUG
    return LoggedStore(store, level) if log.isEnabledFor(level) else store


class LoggedStore:
    """The store of steps, logging each commit that is applied with `level`."""

    def __init__(self, store: Store, level: int) -> None:
        self._store = store
        self._level = level
        self.journal = store.journal

    async def claim(self, hint: StepHint, token: str) -> Claim | Refusal:
        """Take a step, or be refused."""
        claim = await self._store.claim(hint, token)
        if isinstance(claim, Claim):
            enter_step(claim)
        return claim

    async def commit(self, claim: Claim, verdict: Verdict, events: Events) -> Committed:
        """Write a verdict, all or nothing."""
        committed = await self._store.commit(claim, verdict, events)
        if committed.applied:
            self._log(claim, verdict)
        return committed

    def _log(self, claim: Claim, verdict: Verdict) -> None:
        try:
            for line in lines_of(claim, verdict):
                text = redact(line)
                log.log(self._level, "%s %s %s", claim.config.name, claim.run_id, text)
        except Exception:
            # The commit stands, whatever its log line does.
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
