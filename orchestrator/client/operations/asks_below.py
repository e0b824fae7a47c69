"""The calls that wait for people in the runs below a run: what it waits for in the end."""

from collections.abc import Iterator
from itertools import islice

from stepfleet.orchestrator.client.operations.approvals import AsyncFleetApprovals
from stepfleet.orchestrator.records.calls.answers import Ask
from stepfleet.orchestrator.records.run.summary import RunTree

_RUNS = 10
"""Runs that are looked at: a command for each."""


async def asks_below(tree: RunTree, approvals: AsyncFleetApprovals) -> tuple[Ask, ...]:
    """Return the calls that wait for people in the runs below, of the first ten open ones.

    A run with open runs below it waits for these.
    """
    found: list[Ask] = []
    for one in islice(_last_open(tree), _RUNS):
        found += await approvals.of_run(one)
    return tuple(found)


def _last_open(tree: RunTree) -> Iterator[str]:
    """Yield the runs below that have not ended, and have no such run below themselves."""
    for one in tree.below:
        if one.run.status.is_terminal:
            continue
        below = list(_last_open(one))
        yield from below or [one.run.run_id]
