"""`stepfleet explain`: why a run stopped, continues or does not move, with every number."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any

from pydantic.alias_generators import to_snake
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.fleet import print_found
from stepfleet.orchestrator.cli.terminal import WIDE, moment, seconds, shown
from stepfleet.orchestrator.client.approvals import asks_below
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.client.watching.standstill import begins_after
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.protocol.claim import Outage
from stepfleet.orchestrator.protocol.verdict import circuit_id
from stepfleet.orchestrator.records.calls.answers import Ask, Awaited, awaited_by
from stepfleet.orchestrator.records.outcome import (
    ContinuationDecision,
    ContinuationOutcome,
    StopReason,
)
from stepfleet.orchestrator.records.run.facts import explains
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.records.steps import StepResult
from stepfleet.orchestrator.store.circuits import ServiceOutage
from stepfleet.orchestrator.store.codec import awaited_calls, load_wait
from stepfleet.orchestrator.store.codec import moment as time_of
from stepfleet.orchestrator.store.fleet.checks import serving
from stepfleet.orchestrator.store.fleet.overview import WorkerSeen
from stepfleet.orchestrator.store.runs.reading import StoredRun, next_attempt


def explain(
    run: options.RunOrLine,
    batch: options.BatchOfLine = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> None:
    """Explain why a run stopped, continues or does not move.

    With its cause, and every criterion with its numbers.
    """
    read = partial(read_explanation, run, batch)
    print_found(data, read, explanation_picture, json=json)


_FOR = {
    Awaited.RUN: "the end of its sub-agent's run",
    Awaited.APPROVAL: "a person's approval: `stepfleet approvals`",
    Awaited.PERSON: "a person's answer: `stepfleet approvals`",
}

_PEOPLE = {"approval": Awaited.APPROVAL, "question": Awaited.PERSON}


@dataclass(frozen=True, slots=True)
class AwaitedTool:
    """A tool call without a result. `served` tells whether a running worker serves its queue.

    One that waits for a person does so since `since`, and at `until` its time limit decides.
    """

    tool: str
    queue: str
    served: bool = True
    index: int = 0
    since: datetime | None = None
    until: datetime | None = None

    @property
    def text(self) -> str:
        """The wait in words, with the fix where the queue has no worker."""
        if awaited := awaited_by(self.queue):
            since = f", since {moment(self.since)}" if self.since else ""
            until = f", until {moment(self.until)}" if self.until else ""
            return f"{_FOR[awaited]} (tool {self.tool!r}){since}{until}"
        text = f"tool {self.tool!r} on queue {self.queue!r}"
        if self.served:
            return text
        return f"{text}, which no running worker serves; start one: {serving(self.queue)}"


def awaited_tools(run: StoredRun) -> tuple[AwaitedTool, ...]:
    """Return the calls that a run waits for, all marked as served; none for an ended run."""
    if run.state.status.is_terminal:
        return ()
    calls = awaited_calls(run.header)
    return tuple(AwaitedTool(one.tool, one.queue, index=one.index) for one in calls)


def judged(
    awaited: Iterable[AwaitedTool], workers: Iterable[WorkerSeen]
) -> tuple[AwaitedTool, ...]:
    """Return the same calls, marked as unserved on queues that no running worker serves.

    A worker without a list of queues may serve all of them.
    """
    alive = [one for one in workers if one.alive]
    if any(one.queues is None for one in alive):
        return tuple(awaited)
    served = {queue for one in alive for queue in one.queues or ()}
    return tuple(
        replace(one, served=one.queue in served or awaited_by(one.queue) is not None)
        for one in awaited
    )


def dated(awaited: Iterable[AwaitedTool], approvals: Iterable[Ask]) -> tuple[AwaitedTool, ...]:
    """Return the same calls, those that wait for people with their times."""
    times = {one.index: (one.since, one.until) for one in approvals}
    nothing = (None, None)
    return tuple(
        replace(one, since=since, until=until)
        for one in awaited
        for since, until in [times.get(one.index, nothing)]
    )


_HANDOFFS = 5
_STYLES = {
    ContinuationDecision.FORBID_CONTINUATION: "red",
    ContinuationDecision.REQUEST_CONTINUATION: "cyan",
    ContinuationDecision.ALLOW_STOP: "green",
    ContinuationDecision.ALLOW_CONTINUATION: "dim",
}


@dataclass(frozen=True, slots=True)
class JudgedCriterion:
    """One criterion's evaluation; `decisive` marks those that determine the outcome."""

    criterion: str
    decision: ContinuationDecision
    reason: str
    numbers: dict[str, Any]
    stop_reason: StopReason | None
    decisive: bool


@dataclass(frozen=True, slots=True)
class ApprovalBelow:
    """A call that waits for a person, in a run below, or before, the one that is explained."""

    run_id: str
    agent: str
    tool: str
    kind: str
    since: datetime

    @classmethod
    def of(cls, approval: Ask) -> "ApprovalBelow":
        """Return the call as an explanation shows it."""
        return cls(approval.run_id, approval.agent, approval.tool, approval.kind, approval.since)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a run is where it is. `cause` is the error behind its end, if there is one.

    `agent` has the run now, after `handoffs`.
    `below` are the calls in runs below it that wait for people, `before` those of runs before it.
    Its steps have waited for `waited_seconds` for limits of the fleet, apart from their own time.
    """

    run_id: str
    agent: str
    lifecycle: str
    stop_reason: str | None
    steps: int
    resolved_by: str | None
    says: str
    cause: str | None
    batch_id: str | None
    line_id: str | None
    awaited: tuple[AwaitedTool, ...]
    criteria: tuple[JudgedCriterion, ...]
    waited_seconds: float = 0.0
    waited_for: str = ""
    handoffs: tuple[dict[str, Any], ...] = ()
    below: tuple[ApprovalBelow, ...] = ()
    before: tuple[ApprovalBelow, ...] = ()
    wait: dict[str, Any] | None = None
    """Why its open step does not go on now: reason, since when, until when at most."""

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as JSON-ready data."""
        return asdict(self)


def explained(result: AgentRunResult, awaited: tuple[AwaitedTool, ...] = ()) -> Explanation:
    """Return why the run of `result` stopped or, while it is active, why it continues.

    `awaited` are the tools that it waits for.
    """
    outcome = result.outcome
    why = explains(result.stop_reason, result.last_error) if result.stop_reason else None
    return Explanation(
        run_id=result.run_id,
        agent=result.agent_name,
        lifecycle=result.lifecycle.value,
        stop_reason=result.stop_reason.value if result.stop_reason else None,
        steps=result.steps_used,
        resolved_by=outcome.resolved_by if outcome else None,
        says=_says(result, outcome),
        cause=str(why) if why else None,
        batch_id=result.batch_id,
        line_id=result.line_id,
        criteria=_judged(outcome) if outcome else (),
        awaited=awaited,
        handoffs=tuple(one.to_dict() for one in result.handoffs),
        **_waited(result.steps),
    )


def _waited(steps: Iterable[StepResult]) -> dict[str, Any]:
    """Return for how long steps have waited for limits, and for which they waited longest."""
    waited: dict[str, float] = {}
    for step in steps:
        waited[step.waited_for] = waited.get(step.waited_for, 0.0) + step.waited_seconds
    longest = max(waited, key=waited.__getitem__, default="")
    return {"waited_seconds": round(sum(waited.values()), 3), "waited_for": longest}


def _says(result: AgentRunResult, outcome: ContinuationOutcome | None) -> str:
    if result.stop_reason is not None:
        why = result.error or (outcome.reason if outcome else "")
        return f"stopped with reason {result.stop_reason.value}" + (f": {why}" if why else "")
    if outcome is None:
        return f"{result.lifecycle.value}: no step has been evaluated yet"
    then = "continues when resumed" if result.lifecycle is Lifecycle.PAUSED else "continues"
    return f"{result.lifecycle.value}: {then} after its newest step: {outcome.reason}"


def _judged(outcome: ContinuationOutcome) -> tuple[JudgedCriterion, ...]:
    """Return the criteria; a forbidding one decides alone, else all with the same decision do."""
    deciding = [one for one in outcome.evaluations if one.decision is outcome.decision]
    if outcome.decision is ContinuationDecision.FORBID_CONTINUATION:
        deciding = deciding[:1]
    return tuple(
        JudgedCriterion(
            criterion=one.criterion,
            decision=one.decision,
            reason=one.reason,
            numbers=one.context,
            stop_reason=one.stop_reason,
            decisive=any(one is other for other in deciding),
        )
        for one in outcome.evaluations
    )


def explanation_picture(explanation: Explanation) -> RenderableType:
    """Return the output for a terminal."""
    head = Text(f"Run {explanation.run_id} of {shown(explanation.agent, 60)}: ", style="bold")
    head.append(shown(explanation.says), style="")
    steps = "1 step" if explanation.steps == 1 else f"{explanation.steps} steps"
    head.append(f" ({steps})", style="dim")
    if explanation.cause:
        head.append("\nCause: ", style="bold")
        head.append(shown(explanation.cause), style="red")
    if explanation.line_id:
        line = shown(explanation.line_id, 60)
        head.append(f"\nLine {line} of batch {explanation.batch_id}", style="dim")
    _add_handoffs(head, explanation.handoffs)
    if explanation.waited_seconds:
        why = shown(explanation.waited_for, 120) or "limits of the fleet"
        text = f"\nIts steps waited {seconds(explanation.waited_seconds)}, longest for {why}"
        head.append(text, style="dim")
    for tool in explanation.awaited:
        head.append(f"\nIt waits for {tool.text}", style="" if tool.served else "yellow")
    waiting = [("Below it", one) for one in explanation.below]
    waiting += [("Before it", one) for one in explanation.before]
    for place, approval in waiting:
        text = f"\n{place} {shown(approval.agent, 60)} waits for {_FOR[_PEOPLE[approval.kind]]}"
        head.append(f"{text} (tool {shown(approval.tool, 60)!r}), since {moment(approval.since)}")
        head.append(f"\n  {approval.run_id}", style="dim")
    if not explanation.criteria:
        return head
    return Group(head, _Criteria(explanation.criteria))


@dataclass(frozen=True, slots=True)
class _Criteria:
    """A row for each criterion; on a narrow terminal its numbers are below its reason."""

    criteria: Sequence[JudgedCriterion]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("", "criterion", "decision"):
            table.add_column(heading, no_wrap=True)
        for heading in ("reason", "numbers")[: 2 if wide else 1]:
            table.add_column(heading, overflow="fold")
        for one in self.criteria:
            reason, numbers = Text(shown(one.reason)), _numbers(one)
            told = (reason, numbers) if wide else (Group(reason, *([numbers] if numbers else [])),)
            table.add_row(
                Text("→" if one.decisive else "", style="bold"),
                Text(shown(one.criterion, 60), style="bold" if one.decisive else ""),
                Text(one.decision.value, style=_STYLES[one.decision]),
                *told,
            )
        yield table


def _numbers(one: JudgedCriterion) -> Text:
    found = (f"{to_snake(key)}={_number(value)}" for key, value in one.numbers.items())
    return Text(", ".join(found), style="dim")


def _add_handoffs(head: Text, handoffs: Sequence[Mapping[str, Any]]) -> None:
    if len(handoffs) > _HANDOFFS:
        head.append(f"\n{len(handoffs)} hand-offs, the newest of them:", style="dim")
    for made in handoffs[-_HANDOFFS:]:
        by, to, reason = (shown(made[name], 120) for name in ("by", "to", "reason"))
        why = f": {reason}" if reason else ""
        head.append(f"\nStep {made['step']} handed over from {by} to {to}{why}", style="dim")


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else shown(value, 60)


_READ = 10
"""Runs before a run whose calls that wait for people are read."""
Found = tuple[StoredRun, tuple[AwaitedTool, ...]]


async def read_run(named: str, batch: str | None, fleet: AsyncFleet) -> Found:
    """Return the run, or the run of that line, and the tools that it waits for."""
    run = await fleet.runs.show(await fleet.runs.find(named, batch))
    awaited = awaited_tools(run)
    if any(by and by.by_people for by in (awaited_by(one.queue) for one in awaited)):
        awaited = dated(awaited, await fleet.approvals.of_run(run.run_id))
    # The workers are needed only where a tool is awaited.
    return run, judged(awaited, (await fleet.overview()).workers) if awaited else ()


async def read_explanation(named: str, batch: str | None, fleet: AsyncFleet) -> Explanation:
    """Return why a run stopped or continues."""
    run, awaited = await read_run(named, batch, fleet)
    result = run.result()
    approvals: tuple[Ask, ...] = ()
    if any(awaited_by(one.queue) is Awaited.RUN for one in awaited):
        approvals = await asks_below(await fleet.runs.tree(run.run_id), fleet.approvals)
    found = replace(
        explained(result, awaited),
        below=tuple(map(ApprovalBelow.of, approvals)),
        wait=None if result.lifecycle.is_terminal else _wait_of(run),
    )
    waits, before = await waits_of(run, fleet)
    if waits:
        in_front = [ApprovalBelow.of(one) for one in await _approvals_of(before, fleet)]
        says = f"{result.lifecycle.value}: {waits}"
        return replace(found, says=says, before=tuple(in_front))
    if result.lifecycle is not Lifecycle.PAUSED or result.batch_id is None:
        return found
    with contextlib.suppress(ConfigurationError):  # the batch was forgotten
        progress = await (await fleet.batches.get(result.batch_id)).progress()
        if progress.held:
            return replace(found, says=f"paused: its batch is {progress.held_text}")
    return found


def _wait_of(run: StoredRun) -> dict[str, Any] | None:
    wait = load_wait(run.header)
    if wait is None or wait.over:
        return None
    return {name: getattr(wait, name) for name in ("reason", "key", "since", "deadline")}


async def waits_of(run: StoredRun, fleet: AsyncFleet) -> tuple[str, Iterable[str]]:
    """Return why a run does not move, empty where nothing is known, and the runs before it."""
    if run.state.status.is_terminal:
        return "", ()
    step = f"step {int(run.header['step']) + 1}"
    wait = load_wait(run.header)
    if wait and wait.outage:
        return f"{step} waits {_for_services(wait.outage, (await fleet.overview()).outages)}", ()
    if "after" in run.header and (before := await fleet.runs.waits_for(run.run_id)):
        return begins_after(before), before
    if run.state.status is Lifecycle.PAUSED:
        return "", ()
    if limited := await fleet.limits.wait_of(run.run_id):
        return f"{step} waits {limited}", ()
    lost = ((time_of(one.at_ms), one.reason) for one in run.lost)
    again = next_attempt(wait, lost, datetime.now(UTC))
    return f"{step} waits for {again}" if again else await fleet.runs.standstill(run.run_id), ()


async def _approvals_of(runs: Iterable[str], fleet: AsyncFleet) -> list[Ask]:
    """Return the calls of the first runs, and of those below them, that wait for people."""
    found: list[Ask] = []
    for run_id in islice(runs, _READ):
        found += await fleet.approvals.of_run(run_id)
        with contextlib.suppress(ConfigurationError):  # it is still to be created
            found += await asks_below(await fleet.runs.tree(run_id, limit=_READ), fleet.approvals)
    return found


def _for_services(waits: Outage, known: Iterable[ServiceOutage]) -> str:
    """Return since when a run waits for services that are out, and why."""
    named = [str(one) for one in known if circuit_id(one.service) in waits.circuits]
    why = "; ".join(named) or "its model was out, and is back"
    return f"since {waits.since:%Y-%m-%d %H:%M:%S} UTC, without a slot: {why}"
