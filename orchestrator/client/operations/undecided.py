"""Why a run has no call that a decision fits: it was made, or is of another kind, or none waits.

Pure.
"""

from collections.abc import Mapping, Sequence

from stepfleet.orchestrator.protocol.waiting import waits_in
from stepfleet.orchestrator.records.calls.answers import Ask, Awaited, Decision
from stepfleet.orchestrator.store.runs.reading import StoredRun

_CALLS = 20
"""Calls that are named."""
_LONGEST = 300
"""Characters of a decision with its reason."""


def why_undecided(
    run: StoredRun,
    asks: Sequence[Ask],
    made: Mapping[int, Decision],
    call: int | None,
    kind: str | None,
) -> str:
    """Return why none of a run's calls is decided, with the command that fits.

    `asks` are its calls that wait, `made` the decisions in its open step by the calls' places,
    `call` and `kind` what was meant.
    """
    run_id = run.run_id
    if call is not None and call in made:
        return f"call {call} of run {run_id} was {_cut(made[call])}"
    if asks:
        return _others_wait(run_id, asks, call, kind)
    if run.state.status.is_terminal:
        return f"run {run_id} has ended ({run.state.status}){_newest(run)}"
    if made:
        done = "; ".join(f"call {at} was {_cut(one)}" for at, one in list(made.items())[:_CALLS])
        return f"run {run_id} waits for no other decision: {done}"
    return _waits_for_no_person(run)


def _waits_for_no_person(run: StoredRun) -> str:
    """Return what a run waits for that waits for no person."""
    explain = f"stepfleet explain {run.run_id}"
    if "after" in run.header and run.header["step"] == "0":
        return f"run {run.run_id} has not begun, it waits for other runs: {explain}"
    waits = waits_in(run.header.get("waiting", ""), run.header["step"])
    if any(one.queue == Awaited.RUN for one in waits):
        return f"run {run.run_id} waits for its sub-agents' runs; what these wait for: {explain}"
    return f"run {run.run_id} waits for no decision ({run.state.status}){_newest(run)}"


def _others_wait(run_id: str, asks: Sequence[Ask], call: int | None, kind: str | None) -> str:
    """Return which calls wait: of another kind, or others than were meant."""
    deny = f"or stepfleet decide {run_id} --deny"
    is_other_kind = call is None and all(one.kind != kind for one in asks)
    if is_other_kind and kind == "approval":
        return f"run {run_id} asks a question: stepfleet decide {run_id} --answer TEXT, {deny}"
    if is_other_kind and kind == "question":
        tools = ", ".join(sorted({one.tool for one in asks})[:_CALLS])
        approve = f"stepfleet decide {run_id} --approve, {deny}"
        return f"run {run_id} asks no question, it waits for an approval of {tools}: {approve}"
    places = ", ".join(f"{one.index} ({one.kind}, {one.tool})" for one in asks[:_CALLS])
    return f"run {run_id} does not wait for that call, but for: {places}"


def _newest(run: StoredRun) -> str:
    """Return the newest decision in a run's log, if there is one."""
    calls = (call for step in reversed(run.log) for call in reversed(step.result.tool_calls))
    newest = next((call for call in calls if call.decision), None)
    if newest is None or newest.decision is None:
        return ""
    return f"; its call of {newest.tool_name} was {_cut(newest.decision)}"


def _cut(decision: Decision) -> str:
    return str(decision)[:_LONGEST]
