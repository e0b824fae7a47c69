"""Why a run stopped, or goes on: every criterion of its newest evaluation, with numbers. Pure."""

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.cli.doctor.pending_tools import AwaitedTool
from stepfleet.orchestrator.cli.terminal.format import shown
from stepfleet.orchestrator.records.outcome import ContinuationDecision, ContinuationOutcome
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.records.state import Lifecycle

_STYLES = {
    ContinuationDecision.FORBID_CONTINUATION: "red",
    ContinuationDecision.REQUEST_CONTINUATION: "cyan",
    ContinuationDecision.ALLOW_STOP: "green",
    ContinuationDecision.ALLOW_CONTINUATION: "dim",
}


@dataclass(frozen=True, slots=True)
class Judged:
    """One criterion's word; `decisive` marks those from which the outcome follows."""

    criterion: str
    decision: ContinuationDecision
    reason: str
    numbers: dict[str, Any]
    stop_reason: str | None
    decisive: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a run is where it is."""

    run_id: str
    agent: str
    lifecycle: str
    stop_reason: str | None
    steps: int
    resolved_by: str | None
    says: str
    criteria: tuple[Judged, ...]
    awaited: tuple[AwaitedTool, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as JSON-ready data."""
        return {
            "run_id": self.run_id,
            "agent": self.agent,
            "lifecycle": self.lifecycle,
            "stop_reason": self.stop_reason,
            "steps": self.steps,
            "resolved_by": self.resolved_by,
            "says": self.says,
            "awaited": [one.to_dict() for one in self.awaited],
            "criteria": [
                {
                    "criterion": one.criterion,
                    "decision": one.decision.value,
                    "reason": one.reason,
                    "numbers": one.numbers,
                    "stop_reason": one.stop_reason,
                    "decisive": one.decisive,
                }
                for one in self.criteria
            ],
        }


def explain(result: AgentRunResult, awaited: tuple[AwaitedTool, ...] = ()) -> Explanation:
    """Return why the run of `result` stopped or, as long as it is active, why it goes on.

    `awaited` are the tools that it waits for.
    """
    outcome = result.outcome
    return Explanation(
        run_id=result.run_id,
        agent=result.agent_name,
        lifecycle=result.lifecycle.value,
        stop_reason=result.stop_reason.value if result.stop_reason else None,
        steps=result.steps_used,
        resolved_by=outcome.resolved_by if outcome else None,
        says=_says(result, outcome),
        criteria=_judged(outcome) if outcome else (),
        awaited=awaited,
    )


def _says(result: AgentRunResult, outcome: ContinuationOutcome | None) -> str:
    if result.stop_reason is not None:
        why = result.error or (outcome.reason if outcome else "")
        return f"stopped with reason {result.stop_reason.value}" + (f": {why}" if why else "")
    if outcome is None:
        return f"{result.lifecycle.value}: no step has been evaluated yet"
    then = "when resumed it goes on" if result.lifecycle is Lifecycle.PAUSED else "it goes on"
    return f"{result.lifecycle.value}: after its newest step {then}: {outcome.reason}"


def _judged(outcome: ContinuationOutcome) -> tuple[Judged, ...]:
    """Return the criteria; one that forbade decides alone, else all of the same word do."""
    forbids = ContinuationDecision.FORBID_CONTINUATION
    judged: list[Judged] = []
    for one in outcome.evaluations:
        decisive = one.decision is outcome.decision
        if outcome.decision is forbids:
            first = not any(earlier.decisive for earlier in judged)
            decisive = decisive and first
        judged.append(
            Judged(
                criterion=one.criterion,
                decision=one.decision,
                reason=one.reason,
                numbers=one.context,
                stop_reason=one.stop_reason.value if one.stop_reason else None,
                decisive=decisive,
            )
        )
    return tuple(judged)


def picture(explanation: Explanation) -> RenderableType:
    """Return what a terminal shows."""
    head = Text(f"Run {explanation.run_id} of {shown(explanation.agent, 60)}: ", style="bold")
    head.append(shown(explanation.says), style="")
    steps = "1 step" if explanation.steps == 1 else f"{explanation.steps} steps"
    head.append(f" ({steps})", style="dim")
    for tool in explanation.awaited:
        head.append(f"\nIt waits for {tool.text}", style="" if tool.served else "yellow")
    if not explanation.criteria:
        return head
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "criterion", "decision"):
        table.add_column(heading, no_wrap=True)
    for heading in ("reason", "numbers"):
        table.add_column(heading, overflow="fold")
    for one in explanation.criteria:
        numbers = ", ".join(f"{key}={_number(value)}" for key, value in one.numbers.items())
        table.add_row(
            Text("→" if one.decisive else "", style="bold"),
            Text(shown(one.criterion, 60), style="bold" if one.decisive else ""),
            Text(one.decision.value, style=_STYLES[one.decision]),
            Text(shown(one.reason)),
            Text(numbers, style="dim"),
        )
    return Group(head, table)


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else shown(value, 60)
