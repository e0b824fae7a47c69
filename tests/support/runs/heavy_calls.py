"""What tests of tools with a queue of their own share: the tools, and looks into the store."""

import asyncio
import json
from dataclasses import replace
from typing import Any

from support.runs.scripted_steps import Crash, Hands, call, say
from support.runs.stored_runs import Bench

from stepfleet.orchestrator import ToolCallRecord, tool
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.worker.runtime.rescuer import Rescuer

HEAVY = "gpu"


@tool(queue=HEAVY)
async def render(what: str) -> str:
    """Take a while on another machine."""
    await asyncio.sleep(0.05)  # a slow tool
    return f"rendered {what}"


@tool(queue=HEAVY, read_only=True)
def measure(what: str) -> str:
    """Measure on another machine."""
    return f"measured {what}"


@tool(read_only=True)
def look(what: str) -> str:
    """Look something up, in the step."""
    return f"seen {what}"


ONE = (call(("render", {"what": "a"})), say("done"))


async def messages(desk: Bench, queue: str = HEAVY) -> list[Any]:
    """Return the arguments of the tasks that wait in a queue, the next one last."""
    found = await desk.opened.connection.execute("LRANGE", queue, 0, -1)
    shown = [json.loads(text)["headers"] for text in found]
    return [json.loads(one["argsrepr"].replace("'", '"')) for one in shown]


async def journal(desk: Bench, run_id: str) -> dict[str, str]:
    key = f"{desk.opened.keys.run(run_id)}:journal"
    return dict(await desk.opened.connection.execute("HGETALL", key))


async def lost(desk: Bench, run_id: str) -> list[str]:
    return sorted(one.kind for one in (await desk.stored(run_id)).lost)


async def call_lease_runs_out(desk: Bench, run_id: str, index: int = 0) -> None:
    key = f"{desk.opened.keys.run(run_id)}:journal"
    await desk.opened.connection.execute("HSET", key, f"l:{index}", 1, f"n:{index}", 1)
    await overdue(desk, run_id)
    assert await rescued(desk) == 1


def result_of(taken: TakenCall) -> ToolCallRecord:
    """Return a good result of a taken call."""
    call_ = taken.call
    return ToolCallRecord(
        tool_name=call_.name, call_id=call_.id, result="r", timestamp=taken.now, duration_ms=100
    )


async def overdue(desk: Bench, run_id: str) -> None:
    """Make the run overdue for a look."""
    keys = desk.opened.keys
    await desk.opened.connection.execute("ZADD", keys.due(keys.shard_of(run_id)), 1, run_id)


def rescuer_of(desk: Bench) -> Rescuer:
    opened = desk.opened
    return Rescuer(
        opened.connection,
        opened.keys,
        opened.dispatch,
        grace=60,
        interval=1.0,
        long_queue=1_000_000,
        jitter=lambda: 0.5,
    )


async def rescued(desk: Bench) -> int:
    """Return how many hints one look of the rescuer published."""
    return await rescuer_of(desk).rescue()


def crashing_store(desk: Bench, point: str) -> Hands:
    """Return hands whose store ends them at a point behind its script."""

    def visit(name: str) -> None:
        if name == point:
            raise Crash(point)

    steps = replace(desk.opened, crash=visit).steps
    return Hands(replace(desk, steps=steps), desk.agent)
