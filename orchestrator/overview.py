"""What is going on in a fleet right now, for people: nothing is decided by it."""

import os
import socket
from collections.abc import Iterable, Mapping

import orjson
from pydantic import Field

from stepfleet.orchestrator.records.base import Record


class WorkerSeen(Record):
    """A worker process as it last reported. `seen_seconds_ago` grows when it is gone.

    `queues` are those that it serves (None where it does not say), `tool_queues` those that its
    agents' tools need.
    """

    name: str
    seen_seconds_ago: float
    held: int = 0
    slots: int = 0
    agents: tuple[str, ...] = ()
    queues: tuple[str, ...] | None = None
    tool_queues: tuple[str, ...] = ()
    alive: bool = True


class FleetOverview(Record):
    """The fleet at one moment.

    `active` counts runs that are ready, held or waiting for a time; `queue_length` the task
    messages that wait (None where the broker does not say); `oldest_due_seconds` how long
    the run that waits longest is overdue (0 when none is). `unserved` has the queues that no
    living worker serves and some need, each with the number of runs that wait for it.
    """

    redis_version: str
    active: int
    queue_length: int | None
    oldest_due_seconds: float
    workers: tuple[WorkerSeen, ...] = Field(default=())
    quarantined: int = 0
    unserved: dict[str, int] = Field(default_factory=dict)


def workers_seen(reports: Mapping[str, str], *, now: float, silence: float) -> list[WorkerSeen]:
    """Return the workers behind `reports`; one that is silent for longer counts as gone.

    `now` and `silence` are in seconds.
    """
    found = []
    for name, report in sorted(reports.items()):
        told = orjson.loads(report)
        ago = max(now - float(told.get("seen", 0)), 0.0)
        found.append(
            WorkerSeen(
                name=name,
                seen_seconds_ago=round(ago, 1),
                held=int(told.get("held", 0)),
                slots=int(told.get("slots", 0)),
                agents=tuple(told.get("agents", ())),
                queues=tuple(told["queues"]) if "queues" in told else None,
                tool_queues=tuple(told.get("tool_queues", ())),
                alive=ago <= silence and not is_gone_here(name),
            )
        )
    return found


def unserved_queues(workers: Iterable[WorkerSeen], steps: str) -> tuple[str, ...]:
    """Return the queues that no living worker serves: of steps, and of the agents' tools.

    Nothing where no worker lives, or one does not say what it serves.
    """
    served: set[str] = set()
    needed = {steps}
    alive = [one for one in workers if one.alive]
    for one in alive:
        if one.queues is None:
            return ()
        served.update(one.queues)
        needed.update(one.tool_queues)
    return tuple(sorted(needed - served)) if alive else ()


def is_gone_here(name: str) -> bool:
    """Return whether a worker `host:pid` was a process of this machine that is gone."""
    host, _, pid = name.rpartition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
