"""Which tools on queues of their own a run waits for, and whether a worker serves them. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

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
        """The wait in words, with the fix where the queue has no worker."""
        text = f"tool {self.tool!r} on queue {self.queue!r}"
        if self.served:
            return text
        return f"{text}, which no running worker serves; start one: {serving(self.queue)}"


def awaited_tools(run: StoredRun) -> tuple[AwaitedTool, ...]:
    """Return the calls that a run waits for, all marked as served; none for an ended run."""
    if run.state.status.is_terminal:
        return ()
    waits = waits_in(run.header.get("waiting", ""), run.header["step"])
    return tuple(AwaitedTool(wait.tool, wait.queue) for wait in waits)


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
    return tuple(AwaitedTool(one.tool, one.queue, one.queue in served) for one in awaited)
