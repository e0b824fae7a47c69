"""Which tools on queues of their own a run waits for, and whether somebody works there. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stepfleet.orchestrator.cli.doctor.checks import serving
from stepfleet.orchestrator.protocol.waiting import waits_in
from stepfleet.orchestrator.store.fleet_overview import WorkerSeen
from stepfleet.orchestrator.store.runs.reading import StoredRun


@dataclass(frozen=True, slots=True)
class AwaitedTool:
    """A tool call without a result. `served` tells whether a running worker serves its queue."""

    tool: str
    queue: str
    served: bool = True

    @property
    def text(self) -> str:
        """What a person is told, with the fix where nobody works there."""
        told = f"tool {self.tool!r} on queue {self.queue!r}"
        if self.served:
            return told
        return f"{told}, which no running worker serves; start one: {serving(self.queue)}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {"tool": self.tool, "queue": self.queue, "served": self.served}


def awaited_tools(run: StoredRun) -> tuple[AwaitedTool, ...]:
    """Return what a run waits for, each queue taken for served; nothing for one that has ended."""
    if run.state.status.is_terminal:
        return ()
    waits = waits_in(run.header.get("waiting", ""), run.header["step"])
    return tuple(AwaitedTool(wait.tool, wait.queue) for wait in waits)


def judged(
    awaited: Iterable[AwaitedTool], workers: Iterable[WorkerSeen]
) -> tuple[AwaitedTool, ...]:
    """Return the same, those on queues that no living worker serves marked so.

    A worker that does not say what it serves may serve them all.
    """
    alive = [one for one in workers if one.alive]
    if any(one.queues is None for one in alive):
        return tuple(awaited)
    served = {queue for one in alive for queue in one.queues or ()}
    return tuple(AwaitedTool(one.tool, one.queue, one.queue in served) for one in awaited)
